# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Containers: commands, limits, ends, and errors, of each kind."""

import contextlib
from http import client
from http import server
import io
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import threading
from unittest import mock
import urllib.parse
import urllib.request

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from tba_jax.environments import containers
from tba_jax.system import processes
from tests.support import container_kinds
from tests.support import episodes
from tests.support import harness
from tests.support import repair_agent
from tests.support import waiting

_KINDS = ("bubblewrap", "podman", "http")
_CHILD = """
import sys, time
from tba_jax.environments import containers
container = containers.open(*sys.argv[1:])
# Keeps the stdin of the container's first process open.
line = "(exec 3>/proc/1/fd/0; exec sleep 1000) >/dev/null 2>&1 & echo"
container.run(line)
print("ready", flush=True)
container.run("sleep 1001; sleep 1002", deadline_s=1000)
"""
# Notes its arguments, and does what is necessary of them.
_DOCKER = """#!/bin/sh
printf '%s\\n' "$*" >>{log}
case $1 in
  ps) printf '{abandoned}\\n{running}\\n4194305\\n' ;;
  run) shift 5; echo ready; exec cat >/dev/null ;;
  exec) shift 5; exec "$@" ;;
esac
"""


class ContainersTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.stack = self.enter_context(contextlib.ExitStack())

  def kind(self, name):
    """Returns kind and image; skips where it does not work."""
    if name == "podman":
      container_kinds.import_image(self.stack)
      return "podman", container_kinds.IMAGE
    if name == "http":
      kinds = container_kinds.server("bubblewrap")
      name, self.server = self.stack.enter_context(kinds)
    return name, ""

  def open(self, name, **arguments):
    arguments = {"deadline_s": 300.0, **arguments}
    container = containers.open(*self.kind(name), **arguments)
    self.stack.enter_context(container)
    return container

  @parameterized.parameters(*_KINDS)
  @pytest.mark.slow
  def test_runs_commands_and_transfers_files(self, name):
    container = self.open(name)
    self.assertEqual(container.run("pwd; id -u; exit 3"), (3, "/work\n0\n"))
    self.assertEqual(container.run(["cat"], "in"), (0, "in"))
    self.assertEqual(container.run("echo err >&2"), (0, "err\n"))
    self.assertEqual(container.run("printf '\\377'"), (0, "\ufffd"))
    data = bytes(range(256)) * 1000
    container.put("a folder/file", data)
    self.assertEqual(container.get("a folder/file"), data)
    self.assertEqual(container.run("cat | wc -c", data), (0, "256000\n"))
    # No network, not even the machine's loopback.
    _, devices = container.run("cat /proc/net/dev")
    self.assertLen(devices.splitlines(), 3)
    for call in (
        lambda: container.get("missing"),
        lambda: container.get("/tmp"),
        lambda: container.put("/proc/new/file", b""),
        lambda: container.run(["echo", "x" * 10**7]),
        lambda: container.run(["echo", "\0"]),
    ):
      with self.assertRaises(containers.CommandError):
        call()
    self.assertEqual(container.metrics["failed_commands"], 2)
    self.assertEqual(container.metrics["commands"], 13)

  @parameterized.parameters(*_KINDS)
  @pytest.mark.slow
  def test_limits_of_commands_kill_them(self, name):
    container = self.open(name)
    with self.assertRaisesRegex(
        containers.CommandError, r"sleep 1003 .*did not end in 3 s"
    ) as caught:
      line = "(setsid sleep 1003 &) ; echo out; sleep 1003 & wait"
      container.run(line, deadline_s=3.0)
    self.assertEqual(caught.exception.output, "out\n")
    with self.assertRaisesRegex(containers.CommandError, "yes: wrote over"):
      container.run("yes")
    _, listed = container.run("ps -o args; cat /proc/[0-9]*/cmdline")
    self.assertNotRegex(listed, r"(sleep|yes)[\0 ]+1003")

  @parameterized.parameters(*_KINDS)
  @pytest.mark.slow
  def test_containers_end_with_killed_process(self, name):
    command = [sys.executable, "-c", _CHILD, *self.kind(name)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=harness.environment()
    )
    self.assertEqual(child.stdout.readline(), b"ready\n")
    waiting.wait_until(lambda: _running("sleep 1001"))
    if name == "http":
      self.assertEqual(_count(command[3]), 1)
    child.kill()
    child.wait()
    child.stdout.close()
    waiting.wait_until(lambda: not _running("sleep 100[012]"))
    if name == "http":
      waiting.wait_until(lambda: _count(command[3]) == 0)
    if name == "podman":
      waiting.wait_until(
          lambda: not _podman("ps", "-aq", "--filter=name=tba_jax-")
      )

  @pytest.mark.slow
  def test_dead_podman_container_is_error(self):
    container = self.open("podman")
    _podman("rm", "--force", "--latest")
    with self.assertRaisesRegex(
        containers.ContainerError, "^true: the container has died"
    ):
      container.run(["true"])

  @pytest.mark.slow
  def test_podman_containers_with_killed_monitor_are_removed(self):
    kind, image = self.kind("podman")
    command = [sys.executable, "-c", _CHILD, kind, image]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=harness.environment()
    )
    child.stdout.readline()
    child.stdout.close()
    processes.adopt_orphans()
    for pid in _running("conmon"):
      os.kill(pid, signal.SIGKILL)
    processes.kill_descendants(child.pid)
    child.kill()
    child.wait()
    self.assertLen(_podman("ps", "-aq", "--filter=name=tba_jax-"), 1)
    containers.open(kind, image).close()
    self.assertEmpty(_podman("ps", "-aq", "--filter=name=tba_jax-"))

  @pytest.mark.slow
  def test_ended_server_is_error(self):
    container = self.open("http")
    self.server.kill()
    self.server.wait()
    with self.assertRaisesRegex(containers.ContainerError, "POST …/exec"):
      container.run("true")

  @parameterized.parameters(
      ("bubblewrap", "/missing", "must be a folder with a root file system"),
      ("podman", "missing", "cannot start image 'missing'"),
      ("http", "/missing", "must be a folder with a root file system"),
  )
  @pytest.mark.slow
  def test_missing_image_is_error(self, name, image, text):
    kind, _ = self.kind(name)
    with self.assertRaisesRegex(containers.ContainerError, text):
      containers.open(kind, image)

  @parameterized.parameters(
      (dict(kind="lxc"), "kind = 'lxc': must be bubblewrap, podman"),
      (dict(folder="work"), "folder = 'work': must be absolute"),
      (dict(folder="/"), "folder = '/': must be absolute, and not /"),
      (dict(folder="//."), "folder = '//.': must be absolute, and not /"),
      (dict(deadline_s="5"), "deadline_s = '5': must be a finite number"),
      (dict(kind="http://x", options=["y"]), "must be the server's"),
  )
  def test_wrong_argument_is_error(self, arguments, text):
    with self.assertRaisesRegex(ValueError, text):
      containers.open(**arguments)

  @parameterized.parameters(
      (dict(words="true"), ValueError, "words = 'true': must be a list of str"),
      (dict(words=["sleep", 1]), ValueError, "words = .*: must be a list"),
      (dict(deadline_s="5"), ValueError, "deadline_s = '5': must be a finite"),
      (dict(deadline_s=math.nan), ValueError, "deadline_s = nan: must be a"),
      (dict(stdin=bytes(2**24 + 1)), containers.CommandError, "must have at"),
  )
  def test_wrong_command_is_error(self, arguments, error, text):
    right = dict(words=["true"], stdin=b"", deadline_s=1.0, max_bytes=1)
    containers.Command(**right)
    with self.assertRaisesRegex(error, text):
      containers.Command(**{**right, **arguments})

  @pytest.mark.slow
  def test_failing_start_of_bubblewrap_is_error(self):
    mounted = self.create_tempfile().full_path
    container = self.open(
        "bubblewrap", options=["--ro-bind", mounted, "/tmp/mounted"]
    )
    with self.assertRaisesRegex(containers.CommandError, "execvp missing"):
      container.run(["missing"])
    self.assertEqual(
        container.run("echo 'bwrap: execvp no'; exit 1"),
        (1, "bwrap: execvp no\n"),
    )
    os.unlink(mounted)
    with self.assertRaisesRegex(containers.ContainerError, "find source path"):
      container.run(["true"])
    container.close()
    with self.assertRaisesRegex(containers.ContainerError, "is closed"):
      container.run(["true"])
    with self.assertRaisesRegex(
        containers.ContainerError, "folder = '/usr/new': must not be in"
    ):
      containers.open("bubblewrap", folder="/usr/new")

  @pytest.mark.slow
  def test_names_and_input_can_have_any_characters(self):
    container = self.open("bubblewrap")
    for path in ("-", "-x/-y", "a\n/b\n", "/tmp/a b"):
      container.put(path, path.encode())
      self.assertEqual(container.get(path), path.encode())
    self.assertEqual(container.run(["cat"], "\ud800"), (0, "?"))

  @pytest.mark.slow
  def test_outputs_of_first_process_are_discarded(self):
    container = self.open("podman")
    line = "cd /proc/1/fd; echo x >1; echo x >2; readlink 1; readlink 2"
    self.assertEqual(container.run(line), (0, "/dev/null\n" * 2))

  @parameterized.parameters(
      (502, '{"id": 1}', "POST …/start: .*status 502"),
      (200, "<html>", "POST …/start: JSONDecodeError"),
      (200, "[]", "POST …/start: TypeError"),
      (200, "{}", "POST …/start: KeyError"),
      (200, '{"id": 1}', "POST …/exec: KeyError"),
      (200, '{"id": 1, "status": 0, "output": "%"}', "POST …/exec: .*Error"),
      (200, '{"error": "reason"}', "^reason$"),
  )
  def test_wrong_answer_of_server_is_error(self, status, answer, text):

    class Handler(server.BaseHTTPRequestHandler):

      def do_POST(self):  # pylint: disable=invalid-name
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode() + b"\n")

      def log_message(self, *arguments):
        pass

    http = server.HTTPServer(("127.0.0.1", 0), Handler)
    self.stack.enter_context(http)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    self.stack.callback(thread.join)
    self.stack.callback(http.shutdown)
    with self.assertRaisesRegex(containers.ContainerError, text):
      with containers.open(f"http://127.0.0.1:{http.server_port}") as container:
        container.run("true")

  @pytest.mark.slow
  def test_server_refuses_wrong_requests(self):
    url = urllib.parse.urlsplit(self.kind("http")[0])
    for path, length, body, text in (
        ("/wrong/exec", "-1", b"", "KeyError"),
        (f"{url.path}/exec", "-1", b"", "must be at most"),
        (f"{url.path}/exec", "1", b"{", "JSONDecodeError"),
        (f"{url.path}/exec", "2", b"[]", "TypeError"),
        (f"{url.path}/start", "13", b'{"folder": 1}', "TypeError"),
    ):
      connection = client.HTTPConnection(url.netloc, timeout=60)
      connection.putrequest("POST", path)
      connection.putheader("Content-Length", length)
      connection.endheaders(body)
      with connection.getresponse() as response:
        self.assertIn(text, json.load(response)["error"])
      connection.close()

  @parameterized.parameters("bubblewrap", "podman", "docker")
  def test_missing_program_is_error(self, kind):
    self.enter_context(mock.patch.dict(os.environ, PATH="/missing"))
    with self.assertRaisesRegex(containers.ContainerError, "must be installed"):
      containers.open(kind)

  @pytest.mark.slow
  def test_folder_of_image_is_copied_and_others_are_read_only(self):
    image = pathlib.Path(self.create_tempdir().full_path)
    data = container_kinds.root_file_system()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
      tar.extractall(image, filter="tar")
    (image / "home/file").write_text("before")
    with containers.open("bubblewrap", str(image), folder="/home") as container:
      container.put("file", b"after")
      self.assertEqual(container.run("cat /home/file"), (0, "after"))
      with self.assertRaisesRegex(containers.CommandError, "Read-only"):
        container.put("/etc/file", b"")
      status, _ = container.run(f"ls {harness.ROOT}")
      self.assertNotEqual(status, 0)
    self.assertEqual((image / "home/file").read_text(), "before")

  def test_command_lines_of_docker(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    prefix = containers.names_of(0)[:-1]
    names = {"abandoned": f"{prefix}4194305-a", "running": f"{prefix}1-b"}
    (folder / "docker").write_text(_DOCKER.format(log=folder / "log", **names))
    (folder / "docker").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    self.enter_context(mock.patch.dict(os.environ, PATH=path))
    with containers.open(
        "docker", "image:1", folder="/app", options=["--memory=2g"]
    ) as container:
      self.assertEqual(container.run("echo hi"), (0, "hi\n"))
    lines = (folder / "log").read_text().splitlines()
    listed, removed, run, executed, ended = lines
    self.assertEqual(listed, "ps --all --format={{.Names}}")
    self.assertEqual(removed, f"rm --force {names['abandoned']}")
    name = rf"{prefix}{os.getpid()}-\w+"
    self.assertRegex(
        run,
        rf"^run --interactive --rm --pull=never --name={name} --entrypoint=sh"
        r" --log-driver=none --stop-timeout=0 --network=none --memory=2g"
        r" -- image:1 -c mkdir .* /app$",
    )
    self.assertRegex(
        executed,
        r"^exec --interactive --workdir=/app --env=CONTAINER_COMMAND=\w+"
        rf" {name} sh -c echo hi$",
    )
    self.assertRegex(ended, rf"^rm --force {name}$")

  @parameterized.parameters("podman", "docker", "http://127.0.0.1:1")
  @pytest.mark.slow
  def test_kinds_closed_to_episodes_name_what_to_set(self, kind):
    variables = {"REPAIRS_KIND": kind, "REPAIRS_IMAGE": "image"}
    self.enter_context(mock.patch.dict(os.environ, variables))
    made = repair_agent.make(self)
    (prompt,) = made.prompts("train", [0])
    cause, message = prompt.failure
    self.assertEqual(cause, "error")
    self.assertRegex(message, "ContainerError")
    self.assertRegex(message, r"config\.reward\.network=True")


class RepairsTest(absltest.TestCase):
  """Containers in the sandbox of episodes."""

  @pytest.mark.slow
  def test_scripted_agent_solves_each_task(self):
    made = repair_agent.make(self, "Scripted")
    count = len(repair_agent.TASKS)
    _, outcomes = episodes.play(
        made, *[["any turn"]] * count, indices=range(count)
    )
    for outcome in outcomes:
      self.assertEqual(outcome.reward, 1.0, outcome.message)
      self.assertEqual(outcome.metrics["commands"], 4)

  @pytest.mark.slow
  def test_agents_of_npm_may_write_much_and_reach_limits(self):
    agent = repair_agent.Npm()
    much = "yes | head -c 2000000"
    with containers.open("bubblewrap", deadline_s=300.0) as container:
      agent.start(container, "sh", "-c", much)
      line = f"echo context_length_exceeded; {much}; exit 3"
      agent.start(container, "sh", "-c", line)
      with self.assertRaisesRegex(RuntimeError, "^status 3: y\ny"):
        agent.start(container, "sh", "-c", f"{much}; exit 3")
      late = containers.CommandError("did not end in 3600 s")
      with mock.patch.object(container, "run", side_effect=late):
        agent.start(container, "sh", "-c", much)

  @pytest.mark.slow
  def test_file_cannot_cheat(self):
    _, source, right, wrong, values = repair_agent.TASKS[0]
    turns = [
        source.format(right),
        source.format(wrong),
        *repair_agent.attempts(values),
    ]
    made = repair_agent.make(self, "Writer")
    _, outcomes = episodes.play(made, *[[turn] for turn in turns])
    for turn, outcome in zip(turns, outcomes):
      self.assertEqual(outcome.failure, "", (turn, outcome.message))
      self.assertEqual(outcome.reward, float(turn is turns[0]), turn)


def _running(pattern: str) -> list[int]:
  """Returns the pids of processes whose command line starts with a pattern."""
  out = subprocess.run(
      ["pgrep", "--full", f"^{pattern}|/{pattern}"],
      capture_output=True,
      text=True,
  )
  return [int(pid) for pid in out.stdout.split()]


def _podman(*words: str) -> list[str]:
  return subprocess.run(
      ["podman", *words], capture_output=True, text=True
  ).stdout.split()


def _count(url: str) -> int:
  with urllib.request.urlopen(url) as reply:
    return json.load(reply)["containers"]


if __name__ == "__main__":
  absltest.main()
