"""What was not asked of a defense because the undefended model stands there too: read off the records, as all else is.

An evaluation that looks before it asks (`ppbench.run.looks`) searches uploads of `none` first. Where these stand, that
a defense stands would say nothing, and its cells are left out; that it falls all the same goes unseen, see `looks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.metrics.modalities import modality_of
from ppbench.questions.base import question_for
from ppbench.records.schema import Record
from ppbench.report.controls import rebuilding
from ppbench.report.frame import EVALUATION, SCENE, Key, frame_of
from ppbench.report.leak import leak_of
from ppbench.report.worst import WorstCase


def stood(records: Sequence[Record]) -> bool:
    """Return whether `none` was searched in its cells of one scene and stands: nothing is shown to leak."""
    leak = leak_of(records, vouched=True)
    return leak is not None and leak.worst is not None and not leak.falls


@dataclass(frozen=True)
class Unasked:
    """A scene in which `none` was searched and stands, and the defense was not searched.

    scene: key by `SCENE` and the evaluation; undefended: what was found there without a defense.
    """

    defense: str
    scene: Key
    undefended: WorstCase

    @property
    def sentence(self) -> str:
        """Say what was not asked, and why."""
        metric = self.undefended.metric(rebuilding(self.undefended.leading))
        assert metric is not None and metric.value is not None  # else it would not have stood
        figure = modality_of(self.undefended.config).stated(metric.value)
        where = {"init": "at random weights", "final": "after training"}.get(self.scene.stage, self.scene.stage)
        return (
            f"Batches of {self.scene.batch} {where}: not asked what is rebuilt of {self.defense}, for the undefended "
            f"model stands there too ({figure}); --attack standard asks."
        )


def unasked(defense: str, records: Sequence[Record]) -> list[Unasked]:
    """Return the scenes in which `defense` has cells, none of them a search, while `none` was searched and stands."""
    found = []
    for scene, some in frame_of(records).by((*EVALUATION, *SCENE)).items():
        own = [r for r in some if r.config.defense.id == defense]
        searched = [r for r in some if r.config.defense.id == "none" and question_for(r).inputs]
        if defense == "none" or not own or not searched or any(question_for(r).inputs for r in own):
            continue
        worst = some.of(searched).worst(rebuilding(searched[0]))
        if worst is not None and stood(searched):
            found.append(Unasked(defense, scene, worst))
    return sorted(found, key=lambda one: (one.scene.stage, one.scene.batch, one.scene.text()))
