"""The recipes in examples/clusters are what Ray, KubeRay's users and bash can read, and the command
in each of them is one that `hermes-rl run` accepts."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kit
import pytest
import yaml

from hermes_rl.testing import FakeServer

RECIPES = Path(__file__).parents[2] / "examples/clusters"
KUBERAY = yaml.safe_load((RECIPES / "kuberay.yaml").read_text())
NAMES = sorted(path.name for path in RECIPES.iterdir())


def commands(name: str) -> list[list[str]]:
    """Arguments of the `hermes-rl run` lines of a recipe, as its shell would expand them."""
    text = (RECIPES / name).read_text().replace("$((64 * workers))", "512")
    found = re.findall(r"hermes-rl run ([^'\n]+?)(?:'| &)?$", text, re.MULTILINE)
    return [shlex.split(line.replace('"$workers"', "8")) for line in found]


@pytest.mark.parametrize("name", NAMES)
async def test_the_command_of_a_recipe_is_accepted(
    tmp_path: Path, server: FakeServer, name: str
) -> None:
    (arguments,) = commands(name)
    dataset, out = arguments[0], arguments[arguments.index("--out") + 1]
    here = kit.write_rows(tmp_path / "tasks.jsonl", [kit.make_task(1)])
    line = [str(here) if text == dataset else text for text in arguments]
    line[line.index(out)] = str(tmp_path / "run")
    await kit.finish_run(*line, "--base-url", server.base_url, "--dry-run")
    assert not (tmp_path / "run").exists()


def test_ray_accepts_the_configuration_of_its_launcher() -> None:
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    config = yaml.safe_load((RECIPES / "autoscaler.yaml").read_text())
    jsonschema.validate(config, schema)
    assert config["head_node_type"] in config["available_node_types"]


def test_bash_reads_the_script_for_slurm() -> None:
    subprocess.run(["bash", "-n", RECIPES / "slurm.sh"], check=True)


def pods() -> list[dict[str, Any]]:
    cluster = KUBERAY["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_every_pod_sees_the_run_directory_and_the_key() -> None:
    for pod in pods():
        (container,) = pod["containers"]
        (mount,) = container["volumeMounts"]
        assert mount["mountPath"] == "/runs"
        assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]
        assert container["envFrom"]
    head = KUBERAY["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"


def test_recipes_name_the_locked_version_of_ray() -> None:
    import ray

    assert KUBERAY["spec"]["rayClusterSpec"]["rayVersion"] == ray.__version__
