"""Records as if another seed had given them."""

from collections.abc import Sequence

from ppbench.records.schema import Record


def reseeded(records: Sequence[Record], seed: int) -> list[Record]:
    """Return the records under a seed, named by it."""
    configs = [r.config.model_copy(update={"seed": seed}) for r in records]
    return [r.model_copy(update={"config": c, "cell_id": c.cell_id()}) for r, c in zip(records, configs, strict=True)]
