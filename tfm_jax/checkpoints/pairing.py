"""Whether a verifier, a drafter and a Weaver were made for each other."""

from __future__ import annotations

from tfm_jax.checkpoints.errors import refuse
from tfm_jax.config import DrafterConfig, VerifierConfig, WeaverConfig


def check_pair(
    verifier: VerifierConfig,
    drafter: DrafterConfig | None = None,
    weaver: WeaverConfig | None = None,
) -> None:
    """Raises one CheckpointError with both values of everything that does not fit."""
    problems = []

    def same(what: str, given: int, whose: str, expected: int) -> None:
        if given != expected:
            problems.append(f"{what} is {given}, the verifier's {whose} is {expected}")

    if drafter is not None:
        same("drafter hidden_size", drafter.hidden_size, "hidden_size", verifier.hidden_size)
        same("drafter vocab_size", drafter.vocab_size, "vocab_size", verifier.vocab_size)
        layers = verifier.num_hidden_layers
        same("drafter num_target_layers", drafter.num_target_layers, "num_hidden_layers", layers)
        outside = [i for i in drafter.target_layer_ids if not 0 <= i < layers]
        if outside:
            problems.append(
                f"drafter target_layer_ids {outside} lie outside the verifier's layers "
                f"0..{layers - 1}"
            )
        if not 0 <= drafter.mask_token_id < verifier.vocab_size:
            problems.append(
                f"drafter mask_token_id {drafter.mask_token_id} is no row of the verifier's "
                f"embedding of {verifier.vocab_size}"
            )
    if weaver is not None:
        same("Weaver d_model", weaver.d_model, "hidden_size", verifier.hidden_size)
        same("Weaver d_embed", weaver.d_embed, "hidden_size", verifier.hidden_size)
        if drafter is None:
            problems.append("a Weaver scores a drafter's candidates, but there is no drafter")
        elif weaver.depth > drafter.depth:
            problems.append(
                f"Weaver depth K is {weaver.depth}, the drafter's block of {drafter.block_size} "
                f"drafts only {drafter.depth} positions"
            )
    refuse("the checkpoints do not belong together", problems)
