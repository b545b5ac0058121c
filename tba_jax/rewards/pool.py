# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A pool of sandboxed worker processes that judge completions.

For the workers, see `system/supervised_worker.py`.
"""

from collections.abc import Callable, Mapping, Sequence
import os
import pathlib
import shlex
import shutil
import threading
from typing import Any

import ml_collections

from tba_jax.models.hf import hf_hub
from tba_jax.rewards import judges
from tba_jax.rewards import settings as settings_lib
from tba_jax.system import named_paths
from tba_jax.system import processes
from tba_jax.system import sandbox
from tba_jax.system import supervised_worker
from tba_jax.tasks import base
from tba_jax.tasks import settings as task_settings

_SOURCES = frozenset(("data", "test", "train", "validation"))  # Task fields.


class Pool(judges.Judge):
  """Judges in worker processes that are started when first needed."""

  def __init__(
      self,
      task_fields: Mapping[str, Any],
      config_reward: ml_collections.ConfigDict,
      *,
      index_of: Callable[[str, int], int] = lambda split, index: index,
      judges_groups: bool = False,
      on_event: judges.OnEvent | None = None,
      hidden: Sequence[str] = (),
      module: str = "tba_jax.rewards.worker",
  ):
    """Starts the threads, one per worker; reports what is not confined.

    Args:
      task_fields: `config.task`; each worker builds the task from it.
      config_reward: `config.reward`.
      index_of: function from (split, index) of a request to the prompt's index
        in the workers' task.
      judges_groups: whether a request holds all completions of a prompt.
      on_event: event sink, see `Judge`.
      hidden: paths that workers must not see.
      module: worker module, run with `python -m`.
    """
    super().__init__(on_event=on_event)
    self._config = config_reward
    self._index_of = index_of
    self._judges_groups = judges_groups
    fields = dict(task_fields)
    self._workers = supervised_worker.WorkerPool(
        module,
        {"task": fields},
        config_reward,
        make_box(fields, config_reward, hidden),
        links=_cached_data(fields),
        on_event=on_event,
    )

  def _judge(
      self, requests: Sequence[judges.JudgeRequest]
  ) -> list[base.Judgement]:
    if self._judges_groups:
      groups = judges.of_groups(requests)
      judged = self._workers.threads.map(self._judge_group, groups)
      return [judgement for group in judged for judgement in group]
    return list(self._workers.threads.map(self._judge_one, requests))

  def _explain(self, requests: Sequence[judges.JudgeRequest]) -> list[str]:
    # Several hanging explanations cost the deadline only once.
    late = threading.Event()

    def one(request: judges.JudgeRequest) -> str:
      if late.is_set():
        return judges.no_reason("another one was late")
      answer = self._ask("explain", request, request.completion)
      if answer.get("failure") == "deadline":
        late.set()
      if answer.get("failure"):
        return judges.no_reason(f"{answer['failure']}, {answer['message']}")
      return answer["reason"]

    return list(self._workers.threads.map(one, requests))

  def _judge_one(self, request: judges.JudgeRequest) -> base.Judgement:
    what = "judge" if request.stopped else "judge_cut_off"
    return self._judgement(
        request, self._ask(what, request, request.completion)
    )

  def _judge_group(
      self, group: Sequence[judges.JudgeRequest]
  ) -> list[base.Judgement]:
    answer = self._ask("judge_group", group[0], *judges.texts_and_tokens(group))
    # A failure of the worker, such as a deadline, applies to the whole group.
    answers = answer.get("group", [answer] * len(group))
    return [self._judgement(*one) for one in zip(group, answers, strict=True)]

  def _judgement(
      self, request: judges.JudgeRequest, answer: Mapping[str, Any]
  ) -> base.Judgement:
    if answer.get("failure"):
      return self._failed(request, answer["failure"], answer["message"])
    return self._checked(
        request,
        base.Judgement(answer["reward"], answer["key"], answer["parts"]),
    )

  def _ask(
      self,
      what: str,
      request: judges.JudgeRequest,
      *arguments: Any,
  ) -> dict[str, Any]:
    """Returns a worker's answer, or `failure` and `message`."""
    index = self._index_of(request.split, request.index)
    with self._workers.hold() as worker:
      return worker.call([what, request.split, index, *arguments])

  def close(self) -> None:
    """Kills the workers and waits until they have exited."""
    self._workers.close()


def _cached_data(fields: Mapping[str, Any]) -> dict[str, str]:
  """Returns links to a task's cached Hugging Face data for a worker's home.

  As {path below the home: folder}; the worker may have no network.
  """
  out = {}
  for name in _SOURCES.intersection(fields):
    repo = hf_hub.data_name(str(fields[name]).partition("[")[0])
    if repo is not None:
      out |= hf_hub.cache_folders(repo[0])
  return {f".cache/huggingface/{path}": real for path, real in out.items()}


def make_box(
    task_fields: Mapping[str, Any],
    config_reward: ml_collections.ConfigDict,
    hidden: Sequence[str] = (),
) -> sandbox.Box:
  """Returns how workers are confined here, after a trial.

  Workers see the files that the task's fields and `readable` name, and the
  folder of a Python file among them.
  """
  readable = settings_lib.listed_paths(config_reward.readable)
  shown = list(_cached_data(task_fields).values())
  for name, value in task_fields.items():
    if not isinstance(value, str):
      continue
    if name == "verifier":
      readable += named_paths.existing(value)
      shown += _programs(value)
    elif name in task_settings.NAMING_FILES:
      shown += named_paths.existing(value)
    elif os.path.exists(value):  # A path in a field of a user's task.
      shown.append(os.path.abspath(value))
  folders = [
      os.path.dirname(path)
      for path in (*readable, *shown)
      if path.endswith(".py")
  ]
  return sandbox.make_box(
      readable, shown, folders, hidden, network=config_reward.network
  )


def _programs(command: str) -> list[str]:
  """Returns the file of a command's program, and the file it links to."""
  try:
    path = shutil.which(shlex.split(command)[0])
  except (ValueError, IndexError):
    return []
  return [path, os.path.realpath(path)] if path else []


def warning(config: ml_collections.ConfigDict) -> str:
  """Returns what reward code can do here beyond its task, or ""."""
  if config.reward.backend != "pool":
    return ""
  return make_box(config.task.to_dict(), config.reward).warning()


def hidden_paths(
    config: ml_collections.ConfigDict, workdir: str | pathlib.Path
) -> list[str]:
  """Returns the paths of a run that are hidden from its workers."""
  store = config.store
  paths = [
      str(workdir),
      str(processes.private_directory()),
      store.spool_dir,
      store.secret_file,
      store.tls_key_file,
  ]
  return [
      os.path.abspath(os.path.expanduser(path))
      for path in paths
      if path and "://" not in path
  ]


def make_judge(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    task: base.Task,
    on_event: judges.OnEvent | None = None,
) -> judges.Judge:
  """Returns the judge for the task's own reward, in process or in a pool.

  Without the part of a judge over HTTP, which `url_judge.py` adds. Workers of a
  pool do not see `workdir`.
  """
  is_elsewhere = task.has_judge and [*task.part_weights] == [base.JUDGE]
  if config.reward.backend == "pool" and not is_elsewhere:
    return Pool(
        config.task.to_dict(),
        config.reward,
        index_of=task.source_index,
        # Also loads the task's functions, so that their modules' folders are
        # known.
        judges_groups=task.judges_groups,
        on_event=on_event,
        hidden=hidden_paths(config, workdir),
    )
  return judges.InProcess(task, on_event=on_event)
