# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The scripts of launch/: what they would run, checked against the code."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

from absl.testing import parameterized
import yaml

from tba_jax import main
from tba_jax.config import load
from tba_jax.config import settings as settings_lib

_ROOT = pathlib.Path(__file__).parents[2]
_LAUNCH = _ROOT / "launch"
_SCRIPTS = ("slurm.sh", "tpu_vm.sh", "gke.sh")
_OUTSIDE = ("gcloud", "kubectl", "sbatch", "scancel", "srun", "ssh")
# The fields of each kind that gke.yaml uses; True: a value of any kind.
_POD = {
    "hostname": True,
    "subdomain": True,
    "restartPolicy": True,
    "terminationGracePeriodSeconds": True,
    "securityContext": {
        "runAsUser": True,
        "runAsGroup": True,
        "fsGroup": True,
        "fsGroupChangePolicy": True,
    },
    "nodeSelector": True,
    "tolerations": [
        {"key": True, "operator": True, "value": True, "effect": True}
    ],
    "containers": [
        {
            "name": True,
            "image": True,
            "command": True,
            "args": True,
            "env": [
                {"name": True, "valueFrom": {"fieldRef": {"fieldPath": 1}}}
            ],
            "ports": [{"containerPort": True}],
            "resources": {"requests": True, "limits": True},
            "volumeMounts": [
                {"name": 1, "mountPath": 1, "subPath": 1, "readOnly": 1}
            ],
        }
    ],
    "volumes": [
        {
            "name": True,
            "persistentVolumeClaim": {"claimName": True},
            "secret": {"secretName": True, "defaultMode": True},
        }
    ],
}
_TEMPLATE = {"metadata": {"labels": True}, "spec": _POD}
_JOB = {
    "completionMode": True,
    "completions": True,
    "parallelism": True,
    "backoffLimit": True,
    "podFailurePolicy": {
        "rules": [
            {
                "action": True,
                "onPodConditions": [{"type": True, "status": True}],
                "onExitCodes": {
                    "containerName": True,
                    "operator": True,
                    "values": True,
                },
            }
        ]
    },
    "template": _TEMPLATE,
}
_SPECS = {
    ("v1", "Service"): {
        "clusterIP": True,
        "publishNotReadyAddresses": True,
        "selector": True,
        "ports": [{"name": True, "port": True}],
    },
    ("apps/v1", "Deployment"): {
        "replicas": True,
        "strategy": {"type": True},
        "selector": {"matchLabels": True},
        "template": _TEMPLATE,
    },
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "failurePolicy": {"maxRestarts": True},
        "network": {"enableDNSHostnames": 1, "publishNotReadyAddresses": 1},
        "replicatedJobs": [
            {"name": True, "replicas": True, "template": {"spec": _JOB}}
        ],
    },
    ("batch/v1", "Job"): _JOB,
}


def _unknown(value, schema, path=""):
  """Yields the fields of a document that the schema does not have."""
  if isinstance(schema, dict):
    for name, part in value.items():
      if name in schema:
        yield from _unknown(part, schema[name], f"{path}.{name}")
      else:
        yield f"{path}.{name}"
  elif isinstance(schema, list):
    for part in value:
      yield from _unknown(part, schema[0], f"{path}[]")


class ScriptsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    for name in _OUTSIDE:
      path = self.folder / name
      path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.folder}/called\n')
      path.chmod(0o755)
    self.plan = self.folder / "python"
    self.plan.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "PLAN $*"\n')
    self.plan.chmod(0o755)

  def script(self, name, *arguments, **variables):
    """Runs a script where nothing outside can be reached."""
    return subprocess.run(
        ["bash", str(_LAUNCH / name), *arguments],
        env={
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PYTHON": str(self.plan),
            **variables,
        },
        cwd=self.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )

  def dry(self, name, *arguments, **variables):
    done = self.script(name, "--dry_run", *arguments, **variables)
    self.assertEqual(done.returncode, 0, done.stderr)
    return done.stdout

  def test_shellcheck_accepts_scripts(self):
    checker = pathlib.Path(sys.executable).with_name("shellcheck")
    if not checker.exists():
      self.skipTest("shellcheck is not installed")
    files = sorted(map(str, _LAUNCH.glob("*.sh")))
    process = subprocess.run(
        [str(checker), "--external-sources", *files],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    self.assertEqual(process.returncode, 0, process.stdout)

  def test_down_cancels_pending_slurm_jobs(self):
    shown = self.dry("slurm.sh", "down")
    for option in ("--name=tba-sft", "--state=PENDING --name=tba-trainer"):
      self.assertIn(f"scancel {option}", shown)

  def test_workdir_may_be_relative(self):
    shown = self.dry("slurm.sh", WORKDIR="runs/mine")
    self.assertIn(f"--workdir={self.folder}/runs/mine", shown)
    self.assertNotIn("--workdir=runs/mine", shown)

  @parameterized.parameters(*_SCRIPTS)
  def test_dry_run_prints_all_commands_and_runs_none(self, name):
    before = sorted(_ROOT.glob("runs/*"))
    shown = self.dry(name)
    self.assertIn("PLAN -m tba_jax.main --program=plan --config=", shown)
    for program in ("store", "trainer", "searcher"):
      self.assertIn(f"--program={program}", shown)
    self.assertFalse((self.folder / "called").exists())
    self.assertFalse((self.folder / "runs").exists())
    self.assertEqual(sorted(_ROOT.glob("runs/*")), before)
    self.dry(name, "down")
    self.assertFalse((self.folder / "called").exists())

  def test_script_reports_missing_tool_with_install_hint(self):
    self.plan.write_text(
        "#!/bin/sh\necho ModuleNotFoundError: rich >&2\nexit 1"
    )
    done = self.script("slurm.sh", "--dry_run")
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn("--program=plan", done.stdout)
    self.assertIn("--program=trainer", done.stdout)
    self.assertRegex(
        done.stderr,
        r"ModuleNotFoundError: rich\n# for the plan: cd .*"
        r"\.venv/bin/pip install -c constraints\.txt -e \.\n",
    )

  @parameterized.parameters(
      ["--dry_run", "there"],
      ["there", "--dry_run"],
      ["--workdir=there", "--dry_run"],
      ["--dry_run", "--workdir", "there"],
  )
  def test_dry_run_on_this_machine_shows_plan(self, *arguments):
    root = self.folder / "copy"
    (root / "launch").mkdir(parents=True)
    for name in ("local.sh", "setup_venv.sh", "commands.sh"):
      shutil.copy(_LAUNCH / name, root / "launch")
    run = lambda: subprocess.run(
        ["bash", str(root / "launch" / "local.sh"), *arguments,
         "--config.seed=3"],
        cwd=self.folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    done = run()
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn("no plan now", done.stderr)
    self.assertRegex(
        done.stdout, r"--program=train \S+ --config.seed=3 --workdir=there\n"
    )
    self.assertNotIn("--dry_run", done.stdout)
    self.assertFalse((root / ".venv").exists())
    (root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(self.plan, root / ".venv" / "bin" / "python")
    self.assertRegex(
        run().stdout, r"\nPLAN -m tba_jax.main --program=plan .*=3\n"
    )

  @parameterized.parameters(*_SCRIPTS)
  def test_settings_and_programs_match_code(self, name):
    keys = load.flatten(settings_lib.get_config())
    text = (_LAUNCH / name).read_text() + self.dry(name)
    used = set(re.findall(r"--config\.([\w.]+)=", text))
    # An example of the usage.
    self.assertContainsSubset({"store.address", "store.secret_file"}, used)
    self.assertEqual(used - {"a", "c"} - set(keys), set())
    programs = set(re.findall(r"--program=(\w+)", text))
    self.assertEqual(programs - set(main.PROGRAMS), set())

  def test_page_lists_existing_scripts(self):
    text = (_ROOT / "docs/guides/scaling.md").read_text("utf-8")
    for name, action in re.findall(
        r"bash launch/((?:slurm|tpu_vm|gke)\.sh) ([a-z]+)\b", text
    ):
      self.assertRegex((_LAUNCH / name).read_text(), rf"(?m)^  {action}\)")
    for name in ("TRAINER_NODES", "SEARCHERS", "SFT", "TRAINER_SLICES", "NFS"):
      self.assertIn(f"`{name}", text)

  @parameterized.parameters(*_SCRIPTS)
  def test_no_secret_is_in_command(self, name):
    # The folder has the name of this test.
    shown = self.dry(name).replace(str(self.folder), "/here")
    shown = re.sub(r"^ *#.*$", "", shown, flags=re.M)
    for word in re.findall(r"\S*(?:secret|token|password)\S*", shown, re.I):
      # Place of the secret, and no more.
      self.assertRegex(
          word,
          r"^--(config\.store\.secret_file|make_secret)=/"
          # Secret of Kubernetes, its key, and where it is mounted.
          r"|^[{]?(tba-)?secret[,:]?$|^[{]?secretName:$|^/run/tba/secret,$"
          r"|^--from-file=secret=/dev/stdin$",
      )

  @parameterized.parameters(*_SCRIPTS)
  def test_wrong_use_is_refused(self, name):
    for arguments in (["--dryrun"], ["start"]):
      done = self.script(name, "--dry_run", *arguments)
      self.assertEqual(done.returncode, 1)
      self.assertRegex(done.stderr, "error: unknown (flag|action)")
    self.assertEqual(self.script(name, "--help").returncode, 0)

  def test_missing_variable_is_named(self):
    done = self.script("tpu_vm.sh", "up")
    self.assertEqual(done.returncode, 1)
    self.assertRegex(done.stderr, "error: PROJECT is empty: set it at the top")

  def test_failed_plan_stops_launch(self):
    self.plan.write_text('#!/bin/sh\n[ "$1" = -c ] || exit 2\n')
    done = self.script("slurm.sh")
    self.assertEqual(done.returncode, 1)
    self.assertIn("error: the plan above says why", done.stderr)
    self.assertFalse((self.folder / "called").exists())

  def test_slurm_jobs_depend_on_each_other(self):
    (self.folder / "sbatch").write_text(
        "#!/bin/sh\n"
        f"echo $$ >>{self.folder}/ids\n"
        f'echo "$* :: $(cat)" >>{self.folder}/called\n'
        f"wc -l <{self.folder}/ids\n"
    )
    done = self.script("slurm.sh", WORKDIR=f"{self.folder}/w", SEARCHERS="3")
    self.assertEqual(done.returncode, 0, done.stderr)
    called = (self.folder / "called").read_text()
    jobs = re.findall(r"--job-name=(\S+)", called)
    self.assertEqual(jobs, ["tba-sft", "tba-trainer", "tba-searcher"])
    after = "--dependency=afterok:1 --kill-on-invalid-dep=yes"
    self.assertRegex(called, f"{after} --job-name=tba-trainer")
    self.assertRegex(called, "--dependency=after:2 --job-name=tba-searcher")
    self.assertIn("--array=0-2", called)
    self.assertTrue((self.folder / "w" / "logs").is_dir())

  def test_slurm_jobs_are_shell(self):
    shown = self.dry("slurm.sh", NAME="it is", CONFIG="a b.py")
    jobs = re.findall(r"(?:^    .*\n)+", shown, re.M)
    self.assertLen(jobs, 3)
    for job in jobs:
      text = re.sub("^    ", "", job, flags=re.M)
      process = subprocess.run(
          ["bash", "-n"], input=text, capture_output=True, text=True
      )
      self.assertEqual(process.returncode, 0, process.stderr)

  def test_slices_of_trainer_are_numbered(self):
    shown = self.dry("tpu_vm.sh", TRAINER_SLICES="2", TRAINER_FLAGS="--spot")
    self.assertIn("--node-prefix=tba-trainer --node-count=2 --spot", shown)
    self.assertIn("--config.trainer.num_processes=8", shown)
    for slice_ in "01":
      self.assertRegex(
          shown,
          rf"ssh tba-trainer .* --node={slice_} --worker=all .*"
          rf"INDEX=\$\(\({slice_} \* 4 \+ ",
      )
    self.assertIn("describe tba-trainer-0 ", shown)

  def test_gcloud_s_flags_are_passed_on(self):
    capacity = "--provisioning-model=flex-start --max-run-duration=24h"
    shown = self.dry(
        "tpu_vm.sh", "up", "--", "--network=net", "--internal-ips",
        TRAINER_FLAGS=capacity, SEARCHER_FLAGS="--reserved",
        SSH_FLAGS="--internal-ip", SEARCHERS="1",
    )  # fmt: skip
    made = re.findall(r"^\+ gcloud (.*) create \S+ (.*)", shown, re.M)
    command = "compute tpus queued-resources"
    # The flags of flex-start and of one reservation are gcloud alpha's.
    self.assertEqual([m[0] for m in made], [f"alpha {command}", command])
    for (_, flags), own in zip(made, (capacity, "--reserved"), strict=True):
      self.assertEndsWith(flags, f"{own} --network=net --internal-ips")
    self.assertLen(re.findall("resources ssh .*--internal-ip ", shown), 5)
    shown = self.dry("tpu_vm.sh", SEARCHER_FLAGS="", SEARCHERS="1")
    self.assertNotIn("--spot", shown)

  def test_defaults_are_for_their_slice(self):
    """The plan of the scripts, with no share and no data on this machine."""
    command, of_gke = (
        re.search(r"^PLAN (.*)", self.dry(name), re.M)[1].split()
        for name in ("tpu_vm.sh", "gke.sh")
    )
    self.assertEqual(of_gke, command)
    process = subprocess.run(
        [sys.executable, *command],
        cwd=_ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertIn("looked for on the hosts:\n  config.init = ", process.stdout)
    self.assertIn("all other settings are valid", process.stdout)

  @parameterized.parameters(
      ("v5litepod-16", "v6e-8", 4, 8, "v5e v6e", "tpuv5-lite",
       "tpuv6e"),
      ("v5litepod-8", "v5litepod-1", 1, 1, "v5e", "tpuv5-lite", "tpuv5-lite"),
      ("v6e-64", "v5litepod-4", 16, 4, "v6e v5e", "tpuv6e",
       "tpuv5-lite"),
      ("v5p-16", "v5p-8", 2, 4, "v5p", "tpuv5", "tpuv5"),
  )  # fmt: skip
  def test_hosts_chips_and_images_match_type(
      self, trainer, searcher, hosts, chips, kinds, *images
  ):
    shown = self.dry(
        "tpu_vm.sh", TRAINER_TYPE=trainer, SEARCHER_TYPE=searcher,
        SEARCHERS="1", CONFIG="configs/countdown.py",
    )  # fmt: skip
    self.assertIn(f"--config.trainer.num_processes={hosts} ", shown)
    self.assertIn(f"--config.search.mesh.data={chips} ", shown)
    self.assertRegex(shown, rf"PLAN .*--elsewhere {kinds}\n")
    made = re.findall(r"-type=(\S+) --runtime-version=v2-alpha-(\S+)", shown)
    self.assertEqual(made, list(zip((trainer, searcher), images, strict=True)))

  @parameterized.parameters(
      ("SEARCHER_TYPE", "v5litepod-16"), ("SEARCHER_TYPE", "v5p-16"),
      ("TRAINER_TYPE", "v7x-8"), ("TRAINER_TYPE", "v5litepod-abc"),
  )  # fmt: skip
  def test_other_types_are_refused(self, variable, name):
    done = self.script("tpu_vm.sh", "--dry_run", **{variable: name})
    self.assertEqual(done.returncode, 1)
    self.assertRegex(done.stderr, f"error: .*{name}: must (be|have)")

  @parameterized.parameters("KIND", "TRAINER_HOSTS", "SEARCHER_CHIPS")
  def test_refuses_variables_replaced_by_types(self, name):
    done = self.script("tpu_vm.sh", "--dry_run", **{name: "4"})
    self.assertEqual(done.returncode, 1)
    self.assertRegex(
        done.stderr, f"error: {name} is no longer read: .*TRAINER_TYPE"
    )

  @parameterized.parameters(
      ("slurm.sh", "SEARCHER_GPUS", "4", "0"),
      ("tpu_vm.sh", "SEARCHER_TYPE", "v6e-4", "v6e-1"),
      ("gke.sh", "SEARCHER_CHIPS", "4", "0"),
  )
  def test_searcher_uses_all_devices_of_its_host(
      self, name, variable, four, one
  ):
    expected = "--config.search.mesh.data="
    of_all = {variable: four, "CONFIG": "configs/countdown.py"}
    for count, used in ((four, "4"), (one, "1")):
      shown = self.dry(name, **{**of_all, variable: count})
      self.assertEqual(set(re.findall(rf"{expected}(\S+)", shown)), {used})
    own = "--config.search.mesh.tensor=4"
    shown = self.dry(name, **{**of_all, "SETTINGS": own})
    self.assertIn(own, shown)
    self.assertNotIn(expected, shown)
    of_all["CONFIG"] = "configs/gsm8k/tba.py:hardware=v5e-16"
    self.assertNotIn(expected, self.dry(name, **of_all))

  def test_gke_fields_match_schema(self):
    done = self.script("gke.sh", "render", IMAGE="here/tba:1", SEARCHERS="7",
                       SETTINGS="--config.seed=3")  # fmt: skip
    self.assertEqual(done.returncode, 0, done.stderr)
    documents = list(yaml.safe_load_all(done.stdout))
    kinds = [(d["apiVersion"], d["kind"]) for d in documents]
    self.assertEqual(kinds, list(_SPECS))
    for document, schema in zip(documents, _SPECS.values(), strict=True):
      self.assertEqual(list(_unknown(document["spec"], schema)), [])
    service, store, trainer, searcher = (d["spec"] for d in documents)
    labels = store["template"]["metadata"]["labels"]
    self.assertEqual(service["selector"], labels)
    (container,) = store["template"]["spec"]["containers"]
    self.assertIn("--config.seed=3", container["args"])
    self.assertIn(
        "--config.store.address=$(POD_IP):8470-8489", container["args"]
    )
    self.assertEqual((searcher["completions"], searcher["parallelism"]), (7, 7))
    (job,) = trainer["replicatedJobs"]
    self.assertEqual(job["template"]["spec"]["completions"], 4)
    self.assertNotIn("${", done.stdout)

  def test_gke_keeps_secret_off_claim(self):
    kubectl = self.folder / "kubectl"
    kubectl.write_text(
        "#!/bin/bash\n"
        f'echo "$*" >>{self.folder}/called\n'
        'case "$*" in\n'
        f"  get*) [ ! -e {self.folder}/made ] || echo secret/it ;;\n"
        f"  create*) cat >{self.folder}/made ;;\n"
        "  apply*) cat >/dev/null ;;\n"
        "esac\n"
    )
    secrets = set()
    for _ in range(2):
      done = self.script("gke.sh", IMAGE="here/tba:1")
      self.assertEqual(done.returncode, 0, done.stderr)
      secrets.add((self.folder / "made").read_bytes())
    # The second start, of a run that goes on, keeps the first one's.
    (secret,) = secrets
    self.assertLen(secret, 32)
    called = (self.folder / "called").read_text()
    self.assertEqual(called.count("create secret generic -n default tba-se"), 1)
    shown = self.script("gke.sh", "render", IMAGE="here/tba:1").stdout
    self.assertNotIn("make_secret", shown)
    _, store, trainer, searcher = (d["spec"] for d in yaml.safe_load_all(shown))
    (job,) = trainer["replicatedJobs"]
    for pod in (store, job["template"]["spec"], searcher):
      spec = pod["template"]["spec"]
      volume = {"secretName": "tba-secret", "defaultMode": 0o400}
      self.assertIn({"name": "secret", "secret": volume}, spec["volumes"])
      (container,) = spec["containers"]
      (mount,) = (m for m in container["volumeMounts"] if m["name"] == "secret")
      self.assertTrue(mount["readOnly"])
      # A file, not the link that a folder of a Secret has.
      self.assertEqual(mount["subPath"], "secret")
    (container,) = store["template"]["spec"]["containers"]
    self.assertIn(
        f"--config.store.secret_file={mount['mountPath']}", container["args"]
    )

  def test_gke_changes_number_of_searchers(self):
    shown = self.dry("gke.sh", "searchers", "12")
    patch = re.search(r"'(\{.*\})'", shown)[1]
    self.assertEqual(
        yaml.safe_load(patch), {"spec": {"completions": 12, "parallelism": 12}}
    )

  def test_image_contains_role_dependencies(self):
    text = (_LAUNCH / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (.+) \S+$", text, re.M)
    for name in " ".join(copied).split():
      self.assertTrue((_ROOT / name).exists(), name)
    # Configs name environments among the examples.
    self.assertContainsSubset(
        {"tba_jax", "configs", "examples", "launch"}, copied
    )
    self.assertIn("USER tba", text)
