"""The scripts' environments, their sources, and the data that they would load from a hub."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

from tests.dropin.scripts import NIGHTLY, OURS, RELEASE, Script
from tools.environments import Environment, make_once, run_installer

# A source distribution is taken with `pip download`, which asks its build tool for the name and the version
# first. torchft's build tool is a compiler; this one answers in its place.
_BUILD_TOOL = """
import pathlib
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "torchft-0.2.0.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: torchft\\nVersion: 0.2.0\\n")
    return info.name
"""
_SOURCE = "torchft==0.2.0 --hash=sha256:542e17910039735d6686517f98ed49686ba23fc4283b15cf1d984a251eb1546a\n"


def python_for(script: Script) -> Path:
    """Return the interpreter of the script's environment, and make the environment where it is missing.

    Raises:
        UnavailableError: it cannot be installed here; the message says why.
    """
    pins = (f"torch=={script.torch}",) if script.torch else ()
    packages = (*OURS, *script.requirements)
    return Environment(
        script.environment or script.name, packages, script.without_dependencies, pins
    ).interpreter()


def sources() -> Path:
    """Return a folder with torchft's source distribution, and one of its nightly wheels, unpacked.

    They are not installed: no torchft but ours can be imported beside the scripts.

    Raises:
        UnavailableError: they cannot be had here; the message says why.
    """
    return make_once("dropin-sources", f"{_SOURCE}{_BUILD_TOOL}{NIGHTLY}", _take_sources)


def _take_sources(folder: Path) -> None:
    (folder / "tool").mkdir()
    (folder / "tool" / "maturin.py").write_text(_BUILD_TOOL)
    requirements = folder / "requirements.txt"
    requirements.write_text(_SOURCE)
    take = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    build = ["--no-binary=:all:", "--no-build-isolation", "--requirement", str(requirements)]
    run_installer(["env", f"PYTHONPATH={folder / 'tool'}", *take, *build], RELEASE)
    run_installer([*take, NIGHTLY], NIGHTLY)
    shutil.unpack_archive(folder / "torchft-0.2.0.tar.gz", folder, filter="data")
    shutil.unpack_archive(next(folder.glob("*.whl")), folder / "nightly", "zip")


def make_data(folder: Path, python: Path) -> Path:
    """Write a tokenizer and a text data set of made-up words, in the files that Hugging Face's loaders read.

    Args:
        folder: where to write them.
        python: of an environment that has `tokenizers`.
    """
    dice = random.Random(0)
    words = sorted({"".join(dice.choices("abcdefghijklmnop", k=dice.randint(2, 8))) for _ in range(1500)})
    (folder / "texts").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    with (folder / "texts" / "data.json").open("w") as file:
        for _ in range(2000):
            file.write(json.dumps({"text": " ".join(dice.choices(words, k=300))}) + "\n")
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *words])}
    program = (
        "import json, sys; from tokenizers import Tokenizer, models, pre_tokenizers;"
        "tokenizer = Tokenizer(models.WordLevel(json.load(sys.stdin), unk_token='<unk>'));"
        "tokenizer.pre_tokenizer = pre_tokenizers.Whitespace(); tokenizer.save(sys.argv[1])"
    )
    path = folder / "tokenizer" / "tokenizer.json"
    subprocess.run([python, "-c", program, path], input=json.dumps(vocabulary), text=True, check=True)
    special = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    return folder
