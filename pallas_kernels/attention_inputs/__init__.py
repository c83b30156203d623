"""What precedes softmax attention in a layer: heads cut from a projection, normed and rotated."""

from pallas_kernels.attention_inputs.columns import HeadColumns
from pallas_kernels.attention_inputs.prepare import AttentionInputs, attention_inputs
from pallas_kernels.attention_inputs.rotary import rotate, turns

__all__ = ["AttentionInputs", "HeadColumns", "attention_inputs", "rotate", "turns"]
