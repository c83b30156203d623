"""What surrounds the delta rule in a layer: convolution, heads and gates; the gated norm after."""

from pallas_kernels.gdn_inputs.columns import Columns
from pallas_kernels.gdn_inputs.output import gdn_output
from pallas_kernels.gdn_inputs.prepare import GDNInputs, gdn_inputs
from pallas_kernels.gdn_inputs.xla import gates

__all__ = ["Columns", "GDNInputs", "gates", "gdn_inputs", "gdn_output"]
