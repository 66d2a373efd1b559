"""What plugins import from ppbench: the contract of defenses, attacks, questions, data sets and models.

Names stay here, whatever becomes of the modules behind them. `CONTRACT` is the version of it, `CHANGES` says in a
sentence each what changed with a version. A plugin states the version that it was written for, as `contract = 2` in
its class: with an older one it is loaded, with a warning that says what changed since; a newer one is refused.
docs/tutorial-defense.md and docs/tutorial-attack.md use all of this.
"""

from __future__ import annotations

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind, References
from ppbench.base.autodiff import gradient, gradients
from ppbench.base.declarations import CHANGES, CONTRACT
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.claims.claim import Claim, read_paper
from ppbench.federation import bounds
from ppbench.federation.acting import Before, Sent
from ppbench.federation.contract import Ciphering, Defense, Job, Round, Server, Step
from ppbench.federation.evidence import (
    Evidence,
    JointEvidence,
    Shared,
    Simulate,
    as_gradient,
    joint_evidence,
    simulation,
)
from ppbench.federation.plan import Batch, Context, Data, Layout, Local, Noise, Opt, Plan
from ppbench.federation.secagg import KeyedDefense, PairedDefense
from ppbench.federation.threats import THREATS, ThreatModel, register
from ppbench.federation.view import Exchange, StateRecord, View
from ppbench.federation.wire import SERVER, Envelope, Hello, Join, Model, Slot, Update
from ppbench.metrics.intervals import Estimate, Interval, bootstrap, proportion
from ppbench.metrics.modality import Modality
from ppbench.metrics.spec import Judgment, MetricSpec, Rule
from ppbench.nets.classifier import Classifier
from ppbench.nets.net import NetSpec, initial
from ppbench.questions.base import DistanceLaw, Question, one_minus
from ppbench.questions.inquiry import FinishedAudit, Inquiry, Probe, Scored, TargetModel
from ppbench.records.figure import Terms, bootstrap_seed, record_metric
from ppbench.records.schema import CellConfig, Metric, Record
from ppbench.records.scores import ProbedScore, Score
from ppbench.task.dataset import Dataset, Split, holds

__all__ = [
    "CHANGES",
    "CONTRACT",
    "SERVER",
    "THREATS",
    "Attack",
    "Batch",
    "Before",
    "CellConfig",
    "Challenge",
    "Ciphering",
    "Claim",
    "Classifier",
    "Context",
    "Data",
    "Dataset",
    "Defense",
    "DistanceLaw",
    "Envelope",
    "Estimate",
    "Evidence",
    "Exchange",
    "FinishedAudit",
    "Guess",
    "Hello",
    "Inquiry",
    "Interval",
    "Job",
    "Join",
    "JointEvidence",
    "Judgment",
    "KeyedDefense",
    "Kind",
    "Layout",
    "Local",
    "Metric",
    "MetricSpec",
    "Modality",
    "Model",
    "NetSpec",
    "Noise",
    "Opt",
    "PairedDefense",
    "Params",
    "Plan",
    "Probe",
    "ProbedScore",
    "ProtocolError",
    "Question",
    "Record",
    "References",
    "Round",
    "Rule",
    "Score",
    "Scored",
    "SecretDraws",
    "Sent",
    "Server",
    "Shared",
    "Simulate",
    "Slot",
    "Split",
    "StateRecord",
    "Step",
    "TargetModel",
    "Terms",
    "ThreatModel",
    "Tree",
    "Update",
    "UsageError",
    "View",
    "as_gradient",
    "bootstrap",
    "bootstrap_seed",
    "bounds",
    "gradient",
    "gradients",
    "holds",
    "initial",
    "joint_evidence",
    "node",
    "one_minus",
    "proportion",
    "read_paper",
    "record_metric",
    "register",
    "simulation",
    "tree_map",
]
