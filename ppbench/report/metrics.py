"""Unit and meaning of each metric, for columns of tables, axes of figures and docs/columns.md."""

from __future__ import annotations

from typing import Final

SHARE, DB = "share", "dB"
METRICS: Final[dict[str, tuple[str, str]]] = {
    "psnr_median": (DB, "Median PSNR of the reconstructions; a failed one counts as 0 dB, an exact one as 100 dB."),
    "psnr_p95": (DB, "95th percentile of the PSNR over the victims."),
    "psnr_max": (DB, "PSNR of the best rebuilt victim, without an interval."),
    "psnr_worst_decile": (DB, "Mean PSNR of the best rebuilt tenth of the victims."),
    "rmse_mean": ("share of the victim's norm", "Mean of ||guess - x|| / ||x||, the guess clipped to the data range."),
    "rmse_raw_mean": ("share of the victim's norm", "The same, not clipped."),
    "rmse_unit_mean": ("share of the victim's norm", "`rmse_mean` with every victim's error counted as 1 at most."),
    "ssim_mean": ("", "Mean structural similarity (uniform windows of 7 x 7), 1 for an exact image."),
    "share_above_20db": (SHARE, "Share of victims rebuilt above 20 dB."),
    "label_accuracy": (SHARE, "Share of labels recovered, compared as multisets."),
    "at_truth_median": ("", "Median discrepancy of the attack's evidence at the truth; about 0 where it is exact."),
    "ratio_median": ("", "Median of the undefended gradient's magnitude over that of the defense's perturbation."),
    "detection_auc": ("", "How well clients distinguish an active server from an honest one; 0.5: not at all."),
    "reconstruction_accuracy": (SHARE, "Share of a table row's columns that are right."),
    "test_mse_mean": ("squared data range", "Mean squared error of the clipped reconstructions."),
    "lpips_mean": ("", "Mean perceptual distance (LPIPS) by the network that `perceptual` names."),
    "feat_mse_mean": ("", "Mean squared error of the last features of that network."),
    "blind_median": (DB, "Median PSNR of the better of two blind guesses: the public mean image, and grey."),
    "oracle_median": (DB, "Median PSNR of the best among the answer and what the attack rejected; never a result."),
    "evaluations_per_broken": (
        "gradient evaluations",
        "Total evaluations divided by the number of victims above 20 dB.",
    ),
    "reidentified": (SHARE, "Originals that their reconstruction is nearest to among held-out images, by pixels."),
    "recognized": (SHARE, "Classes that the five nearest held-out images vote for rightly, by pixels."),
    "reidentified_features": (SHARE, "`reidentified` by the features of the network that `perceptual` names."),
    "recognized_features": (SHARE, "`recognized` by the features of that network."),
    "gain_median": (DB, "Median PSNR beyond the better of two blind guesses."),
    "asr": (SHARE, "Attack success rate: share of right decisions on who is a member; 0.5 is chance."),
    "auc": ("", "Area under the ROC curve of members against others; 0.5 is chance."),
    "tpr_at_1pct_fpr": (SHARE, "True-positive rate at a false-positive rate of 1 %."),
    "tpr_at_0.1pct_fpr": (SHARE, "True-positive rate at a false-positive rate of 0.1 %."),
    "canary_auc": ("", "`auc` of an audit's canaries."),
    "canary_tpr_at_1pct_fpr": (SHARE, "`tpr_at_1pct_fpr` of an audit's canaries."),
    "canary_tpr_at_0.1pct_fpr": (SHARE, "`tpr_at_0.1pct_fpr` of an audit's canaries."),
    "epsilon_lower": ("", "Lower bound of epsilon at 95 % by an audit."),
    "epsilon_gaussian": ("", "The same bound under the assumption of a Gaussian mechanism."),
    "batch_auc": ("", "`auc` of the question who was in a victim's batch."),
    "batch_asr": (SHARE, "`asr` of the question who was in a victim's batch."),
    "tracing_accuracy": (SHARE, "Share of images traced to the client that owns them."),
    "agreement": (SHARE, "Share of inputs for which the true model's decision was read."),
    "output_error": ("share of the outputs' norm", "Mean error of the extracted outputs."),
    "client_epsilon": ("", "Estimate (no bound) of a client's epsilon from canary clients."),
    "client_epsilon_null": ("", "The same for canary clients that took no part: the noise of the estimate."),
}
"""Unit and meaning of the metrics of our own questions; audits also have `auc_FAMILY` for each family of canaries."""
