"""What a paper says about its own defense, as data: the table of claims sets records beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A number that a paper prints about its defense, or a property that it states without one.

    Attributes:
        metric: "cap_reconstruction", "cap_label", "cap_tracing"; "asr" (of membership attacks on what clients train
            on); "psnr_median" (of what the server rebuilds); "agreement" (with the true model's decisions, by who holds
            what clients train on); "accuracy", "accuracy_top5", "dice", "mse", "epsilon"; "accuracy_rises" (with the
            control parameter); "upload_ratio" (bytes up, to the undefended), "bytes_saving" (share of a round's bytes,
            both ways, that is saved), "memory_ratio" (a client's peak memory, to the undefended); "client_cost_ratio",
            "client_backward_ratio" (a client's time, its backward passes', to the undefended).
        value: as printed; shares in [0, 1]. None for a property, then `note` states it.
        dataset, model: as records call them.  batch: of the victims, None where the paper names none.
        source: the table or the place in the paper.
        when: parameters (name, value) of the defense that it holds for.
        clients: number of clients, None for any.  options: options (name, value) of the model.
        partition: "iid", "imbalanced" or "dirichlet", with or without its parameter as ":0.3"; "" for any.
        undefended: what the paper prints for the undefended model beside it.
        setting: the paper's set-up in words.  note: what a reader must know about the number.
    """

    metric: str
    value: float | None
    dataset: str
    model: str
    batch: int | None
    source: str
    when: tuple[tuple[str, float | str], ...] = ()
    clients: int | None = None
    options: tuple[tuple[str, float | str], ...] = ()
    undefended: float | None = None
    setting: str = ""
    note: str = ""
    partition: str = ""
