"""Checks manifests against Kubernetes' schemas, in an environment that has them: FILE...

A JobSet is none of Kubernetes' own kinds: what is checked of it are the Jobs in it. Each manifest is checked
with an unknown field, too, which has to be refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

VERSION = "1.37"


def kubernetes_own(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what Kubernetes has a schema for."""
    if manifest["kind"] != "JobSet":
        yield manifest
        return
    for job in manifest["spec"]["replicatedJobs"]:
        yield {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job["name"]},
            "spec": job["template"]["spec"],
        }


def spoilt(manifest: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(manifest)
    found.setdefault("spec", found)["unknownField"] = 1
    return found


for path in sys.argv[1:]:
    for document in yaml.safe_load_all(Path(path).read_text()):
        for own in kubernetes_own(document):
            kubernetes_validate.validate(own, VERSION, strict=True)
            print(document["kind"], own["metadata"]["name"])
            try:
                kubernetes_validate.validate(spoilt(own), VERSION, strict=True)
            except kubernetes_validate.ValidationError:
                continue
            sys.exit(f"{own['kind']} with an unknown field was taken")
