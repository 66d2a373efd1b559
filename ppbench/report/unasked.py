"""Scenes in which a defense was not searched because the undefended model withstands too, from the records.

An evaluation with a first look (`ppbench.run.looks`) searches uploads of `none` first. Where these withstand, a defense
that withstands would show nothing, and its cells are left out; a defense that would fall goes unseen, see `looks`.
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


def undefended_stands(records: Sequence[Record]) -> bool:
    """Return whether the searches of `none` in one scene gave figures, and nothing is shown to leak."""
    leak = leak_of(records, vouched=True)
    return leak is not None and leak.worst is not None and not leak.falls


@dataclass(frozen=True)
class SkippedSearch:
    """A scene in which `none` was searched and withstands, and the defense was not searched.

    scene: key by `EVALUATION` and `SCENE`; undefended: the worst case of `none` there.
    """

    defense: str
    scene: Key
    undefended: WorstCase

    @property
    def sentence(self) -> str:
        """What was left out, and why."""
        metric = self.undefended.metric(rebuilding(self.undefended.leading))
        assert metric is not None and metric.value is not None  # else it would not have stood
        figure = modality_of(self.undefended.config).stated(metric.value)
        where = {"init": "at random weights", "final": "after training"}.get(self.scene.stage, self.scene.stage)
        return (
            f"Batches of {self.scene.batch} {where}: {self.defense} was not searched, because the undefended model "
            f"withstands there too ({figure}); --attack standard searches it."
        )


def skipped_searches(defense: str, records: Sequence[Record]) -> list[SkippedSearch]:
    """Return the scenes in which `defense` has cells but no search, while `none` was searched and withstands."""
    scenes = []
    for scene, some in frame_of(records).by((*EVALUATION, *SCENE)).items():
        own = [r for r in some if r.config.defense.id == defense]
        searched = [r for r in some if r.config.defense.id == "none" and question_for(r).inputs]
        if defense == "none" or not own or not searched or any(question_for(r).inputs for r in own):
            continue
        worst = some.of(searched).worst(rebuilding(searched[0]))
        if worst is not None and undefended_stands(searched):
            scenes.append(SkippedSearch(defense, scene, worst))
    return sorted(scenes, key=lambda one: (one.scene.stage, one.scene.batch, one.scene.text()))
