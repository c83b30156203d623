"""A round's draft tree: described as data, drawn as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree as Drawing

if TYPE_CHECKING:
    from tfm_jax.decoding.accept import Acceptance
    from tfm_jax.model import Model
    from tfm_jax.tree import Tree

ACCEPTED, REJECTED = "bold green", "dim"


def describe_tree(model: Model, tree: Tree, acceptance: Acceptance, number: int) -> dict[str, Any]:
    """Nodes of round `number`, root first; which were accepted; the token that followed them."""
    import numpy as np

    accepted = np.asarray(acceptance.path)[: int(acceptance.count)].tolist()
    columns = zip(
        np.asarray(tree.valid).tolist(),
        np.asarray(tree.token).tolist(),
        np.asarray(tree.parent).tolist(),
        np.asarray(tree.logprob).tolist(),
        strict=True,
    )
    nodes = [
        {
            "row": row,
            "parent": None if row == 0 else parent,
            "token": token,
            "text": token_text(model, token),
            "logprob": logprob,
            "accepted": row in accepted,
        }
        for row, (valid, token, parent, logprob) in enumerate(columns)
        if valid
    ]
    bonus = int(acceptance.bonus)
    return {
        "round": number,
        "nodes": nodes,
        "bonus": {"after": accepted[-1], "token": bonus, "text": token_text(model, bonus)},
    }


def draw_tree(described: dict[str, Any]) -> Drawing:
    """The tree, best children first, accepted path and bonus token marked."""
    nodes, bonus = described["nodes"], described["bonus"]
    accepted = sum(node["accepted"] for node in nodes) - 1
    root = Drawing(
        Text(
            f"round {described['round']}: {len(nodes) - 1} drafted, {accepted} accepted, "
            f"then {bonus['text']!r}"
        )
    )
    below: dict[int | None, list[dict[str, Any]]] = {}
    for node in sorted(nodes, key=lambda node: -node["logprob"]):
        below.setdefault(node["parent"], []).append(node)

    def add(branch: Drawing, node: dict[str, Any]) -> None:
        branch = branch.add(_label(node))
        for child in below.get(node["row"], []):
            add(branch, child)
        if node["row"] == bonus["after"]:
            branch.add(Text(f"{bonus['text']!r} the verifier's own", ACCEPTED))

    add(root, nodes[0])
    return root


def token_text(model: Model, token: int) -> str:
    """What a token stands for; its id if there is no tokenizer."""
    if model.tokenizer is None:
        return str(token)
    return model.tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")


def _label(node: dict[str, Any]) -> Text:
    label = Text(repr(node["text"]), ACCEPTED if node["accepted"] else REJECTED)
    if node["parent"] is not None:
        label.append(f" {node['logprob']:.2f}")
    if node["accepted"]:
        label.append(" ✓")
    return label
