"""The comparison with DAGER's code: texts are counted in place, its functions run without its command line, and end."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "peers" / "against_dager.py"


@pytest.fixture(scope="module")
def script(script: Callable[[Path], ModuleType]) -> ModuleType:
    """Return the benchmark's script as a module, without running it."""
    return script(SCRIPT)


def test_texts_are_matched_to_the_truth_and_counted_in_place(script: ModuleType) -> None:
    texts = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    read = script.score([[8, 9, 10, 99], [5, 6, 7]], texts, 2.0)
    assert (read.right, read.exact, read.seconds) == (6 / 7, 1, 2.0)
    assert script.score([[6, 7, 5]], texts, 0.0).right == 0.0  # tokens in another place
    assert script.score([], texts, 0.0).exact == 0  # nothing was returned


def test_texts_of_unlike_lengths_are_padded_on_the_right(script: ModuleType) -> None:
    pytest.importorskip("transformers")
    batch = script.NumberTokenizer(20)([[5, 6, 7], [8]])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_functions_are_taken_out_of_a_file_that_cannot_be_imported(script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "attack.py"
    file.write_text("raise SystemExit\ndef filter_l1():\n    return 3\ndef other():\n    pass\n")
    names = script.functions_of(file, ("filter_l1", "reconstruct"), {"kept": 1})
    assert names["filter_l1"]() == 3 and names["kept"] == 1 and "other" not in names


def test_what_does_not_end_is_stopped_by_the_processors_clock(script: ModuleType) -> None:
    with pytest.raises(TimeoutError, match=r"not ended after 0\.05 s"), script.stopped(0.05):
        while True:
            pass


def test_a_decoder_and_an_encoder_get_the_options_of_their_scripts(script: ModuleType) -> None:
    encoder, decoder = script.options("minilm", 4, None), script.options("gpt2", 4, 1e-8)
    assert "maxB" in encoder and "bert-base-uncased" in encoder and "--rank_tol" not in encoder
    assert decoder[-2:] == ["--rank_tol", "1e-08"] and "all" in decoder
