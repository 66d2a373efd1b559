"""Attack a published transcript with numpy alone: the label of a single image is where the head's bias gradient falls.

Run: python labels.py TRANSCRIPT NAME    writes NAME.json and NAME.safetensors, which `ppbench score` takes.
"""

import json
import sys
from pathlib import Path

import numpy as np

DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}


def read(path):
    """Return the tensors of a safetensors file: 8 bytes of header length, the header in JSON, the values."""
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = {name: about for name, about in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}
    values = {name: data[8 + size :][slice(*about["data_offsets"])] for name, about in header.items()}
    return {n: np.frombuffer(values[n], DTYPES[a["dtype"]]).reshape(a["shape"]) for n, a in header.items()}


def write(path, **arrays):
    """Write little-endian arrays as safetensors."""
    header, end = {}, 0
    for name, array in arrays.items():
        kind = {"f": "F", "i": "I"}[array.dtype.kind] + str(8 * array.itemsize)
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    values = b"".join(array.tobytes() for array in arrays.values())
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + values)


def main(transcript, name):
    """Answer the question "label"; iDLG (Zhao, Mopuri and Bilen 2020)."""
    about = json.loads(Path(transcript, "transcript.json").read_text())
    tensors = read(Path(transcript, "gradients.safetensors"))
    y = np.zeros((len(about["questions"]), 1), "<i8")
    for number, seen in enumerate(about["observed"]):
        y[seen["question"], 0] = tensors[f"gradient.{number}.head.bias"].argmin()
    write(f"{name}.safetensors", y=y)
    fields = {"schema": "ppbench.guesses/1", "transcript": about["id"], "kind": "label", "name": "idlg-labels"}
    more = {"version": "1", "reference": "arXiv:2001.02610", "licence": "Apache-2.0", "knows": False}
    Path(f"{name}.json").write_text(json.dumps(fields | more))


if __name__ == "__main__":
    main(*sys.argv[1:])
