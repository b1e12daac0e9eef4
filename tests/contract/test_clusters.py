"""The files for cluster schedulers are what the schedulers take."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

CLUSTERS = Path(__file__).resolve().parents[2] / "examples" / "clusters"
KUBERNETES = CLUSTERS / "kubernetes"
# The documented fields, of those that the manifests may use; "*": whatever the user names.
_CONTAINER = {
    **dict.fromkeys(("name", "image"), str),
    "command": [str],
    "args": [str],
    "resources": {"limits": {"*": int}},
    "volumeMounts": [dict.fromkeys(("name", "mountPath"), str)],
}
_VOLUME = {
    "name": str,
    "persistentVolumeClaim": {"claimName": str},
    "emptyDir": {"medium": str},
}
_POD = {"subdomain": str, "restartPolicy": str, "containers": [_CONTAINER], "volumes": [_VOLUME]}
_LABELS = {"matchLabels": {"*": str}}
SPECS: dict[tuple[str, str], Any] = {
    ("v1", "Service"): {
        "clusterIP": str,
        "publishNotReadyAddresses": bool,
        "selector": {"*": str},
    },
    ("batch/v1", "Job"): {
        "completionMode": str,
        **dict.fromkeys(("completions", "parallelism", "backoffLimit"), int),
        "template": {"spec": _POD},
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "podSelector": _LABELS,
        "policyTypes": [str],
        "ingress": [{"from": [{"podSelector": _LABELS}]}],
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {"name": str},
        "trainer": {
            "image": str,
            "numNodes": int,
            "command": [str],
            "args": [str],
            "resourcesPerNode": {"limits": {"*": int}},
        },
    },
}


def problems(value: Any, schema: Any, at: str) -> list[str]:
    """What of a manifest is not as the documented fields say."""
    if isinstance(schema, type):
        return [] if isinstance(value, schema) else [f"{at}: {value!r} is no {schema.__name__}"]
    if not isinstance(value, type(schema)):
        return [f"{at}: {value!r} is no {type(schema).__name__}"]
    if isinstance(schema, list):
        return [p for i, part in enumerate(value) for p in problems(part, schema[0], f"{at}[{i}]")]
    found = []
    for name, part in value.items():
        known = schema.get(name, schema.get("*"))
        found += [f"{at}.{name}?"] if known is None else problems(part, known, f"{at}.{name}")
    return found


def manifests() -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted(KUBERNETES.glob("*.yaml"))]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def test_manifests_of_kubernetes_have_documented_fields_only() -> None:
    found = manifests()
    assert {(m["apiVersion"], m["kind"]) for m in found} == set(SPECS)
    for manifest in found:
        schema = SPECS[manifest["apiVersion"], manifest["kind"]]
        assert problems(manifest["spec"], schema, manifest["kind"]) == []
        assert list(manifest) == ["apiVersion", "kind", "metadata", "spec"]
    job = next(m["spec"] for m in found if m["kind"] == "Job")
    assert problems({**job, "completions": "2"}, SPECS["batch/v1", "Job"], "Job") != []
    assert problems({**job, "completionModes": "x"}, SPECS["batch/v1", "Job"], "Job") != []
    # The pods find each other by the Service; torchrun has as many nodes as there are pods.
    service = next(m for m in found if m["kind"] == "Service")
    pod = job["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    words = [*pod["containers"][0]["command"], *pod["containers"][0]["args"]]
    assert f"--nnodes={job['completions']}" in words
    assert f"--rdzv-endpoint=train-0.{pod['subdomain']}:29400" in words
    script = words[words.index("train.py") :]
    assert script[1] == str(job["completions"])
    assert script[2] == str(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


@pytest.mark.parametrize("name", ["kubernetes", "plain_script", "ray", "slurm", "torchrun"])
def test_readme_of_a_cluster_is_short_and_names_files_that_are_there(name: str) -> None:
    folder = CLUSTERS / name
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= 13
    named = set(re.findall(r"[\w./]+\.(?:py|sbatch|yaml)\b", text))
    for path in named:
        assert (folder / path).exists() or (CLUSTERS / path).exists(), path
    assert "../../../docs/multi_node.md" in text


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_ray_starts_killed_workers_again_and_they_go_on(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray Train needs ray[train]")
    log, done, deadline = tmp_path / "log", tmp_path / ".lightning_par-progress", 400.0
    words = [sys.executable, str(CLUSTERS / "ray" / "train.py"), "2", str(tmp_path), "60"]
    with log.open("w") as said:
        run = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        deadline += time.monotonic()
        while not done.exists() or int(done.read_text() or 0) < 7:  # steps; the fifth is saved
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        workers = re.findall(r"\(RayTrainWorker pid=(\d+)\)", log.read_text())
        os.kill(int(workers[-1]), signal.SIGKILL)
        assert run.wait(deadline - time.monotonic()) == 0, log.read_text()
    finally:
        run.kill()
        run.wait()
    text = log.read_text()
    assert f"Restoring states from the checkpoint path at {tmp_path}/last.ckpt" in text
    assert re.search(
        r"starts after step \d*[05], but the previous run in .* had reached step \d+", text
    )
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 60
