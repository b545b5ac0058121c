# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `trainer` program: draws batches, trains, publishes, evaluates, saves.

`Trainer.run` is the training loop. While the devices work on one step, the host
draws and dispatches the next one, if its data has already arrived.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import math
import signal
import socket
import sys
import time
from typing import Any

from absl import logging
import jax
import ml_collections

from tba_jax.config import validate
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.monitor import metrics as metrics_lib
from tba_jax.monitor import recorder as recorder_lib
from tba_jax.monitor import run_directory
from tba_jax.programs import sizes
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import prompt_order
from tba_jax.replay import queue_server
from tba_jax.replay import service as service_lib
from tba_jax.system import bucket
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.tasks import base as tasks_base
from tba_jax.tasks import rows
from tba_jax.training import agreement
from tba_jax.training import batches
from tba_jax.training import checkpoint
from tba_jax.training import cluster as cluster_lib
from tba_jax.training import device_work
from tba_jax.training import evaluations as evaluations_lib
from tba_jax.training import guards as guards_lib
from tba_jax.training import policy as policy_lib
from tba_jax.training import publication
from tba_jax.training import reward_judge
from tba_jax.training import schedules
from tba_jax.training import sharding
from tba_jax.training import train_step
from tba_jax.transport import base as transport_base

# Seconds that searchers get to deliver finished groups at the end of a run.
_FINISH_S = 15.0
_INTERRUPT_S = 5.0
# The least time for publishing the first params.
_PUBLISH_S = 60.0

# The batch and metrics of a step that the devices work on.
Running = tuple[buffer_lib.Draw, dict[str, jax.Array]]


def run_trainer(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs one trainer process until the last step, a signal or an error.

  `operands` place the process in its cluster (`cluster.join`); none if alone.
  """
  return train(config, workdir, operands, processes.start_role().is_set)


def train(
    config: ml_collections.ConfigDict,
    workdir: str,
    operands: Sequence[str],
    should_stop: Callable[[], bool],
) -> int:
  """Trains in the main thread of a process that is set up; see `run_trainer`.

  Returns the exit status; if `should_stop` ended it, 75 after saving.
  """
  run = run_directory.open_run(workdir, config)
  try:
    joined = cluster_lib.join(config.trainer, operands, run.secret, run.tls)
    with joined as cluster, _open(config, run, cluster) as trainer:
      done = trainer.run(cluster.stopper(should_stop))
      status = processes.EXIT_OK if done else processes.EXIT_INTERRUPTED
      cluster.end(status)
  except run_directory.NoRunError:
    raise
  except (FloatingPointError, ValueError) as error:
    # A restart would fail in the same place: no status that asks for one.
    logging.exception("the trainer cannot continue")
    print(f"error: {error}", file=sys.stderr)
    return cluster_lib.status_of(error)
  except cluster_lib.Ended as end:
    return end.status
  return status


@contextlib.contextmanager
def _open(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    cluster: cluster_lib.Cluster,
) -> Iterator["Trainer | device_work.Follower"]:
  """Yields the trainer on process 0 and a follower on the others."""
  closing, error = contextlib.ExitStack(), None
  try:
    agreement.check_processes(cluster, config, run)
    if cluster.leads:
      _take_run(config, run, closing)
    cluster.begin()
    make = Trainer if cluster.leads else make_follower
    yield make(config, run, cluster, closing)
  except BaseException as raised:
    error = raised
    raise
  finally:
    if not cluster.leaves_alone(error):
      # Announce the end first: closing is collective.
      cluster.end(cluster_lib.status_of(error))
      closing.close()


def _take_run(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    closing: contextlib.ExitStack,
) -> None:
  """Locks the run directory and the store, before anything is written.

  Raises:
    NoRunError: another trainer has them, or a file or setting does not fit.
  """
  try:
    lock = run_directory.lock(str(run.workdir), "trainer")
    closing.callback(bucket.hold(lock, run.workdir).close)
    validate.check_resume(run_directory.load_config(str(run.workdir)), config)
    run_directory.check_written(run)
    _check_epoch(run)
    with contextlib.closing(publication.connect(config, run)) as transport:
      lock_store(transport, run)
  except ValueError as error:
    raise run_directory.NoRunError(str(error)) from error


def _check_epoch(run: run_directory.Run) -> None:
  """Raises ValueError if the run's epoch counter was lost."""
  epoch = run.workdir / "epoch.json"
  if (run.workdir / "metrics.jsonl").exists() and not epoch.exists():
    raise ValueError(
        f"{epoch} is missing, though the run has metrics: restore it as"
        ' {"epoch": N}, N above every "epoch" in metrics.jsonl'
    )


def _check_is_new(
    config: ml_collections.ConfigDict, run: run_directory.Run
) -> None:
  """Raises NoRunError if the run should have a checkpoint by now."""
  records = jsonl.read_jsonl(run.workdir / "metrics.jsonl")
  last = max((int(r.get("step", 0)) for r in records), default=0)
  every = config.checkpoint.every_steps
  # The second periodic save starts only after the first is complete.
  if every and last >= 2 * every:
    raise run_directory.NoRunError(
        f"{run.workdir / 'checkpoints'}: no checkpoint found, though"
        f" metrics.jsonl goes to step {last}; restore it or use a new"
        " directory"
    )


def lock_store(
    transport: transport_base.Transport, run: run_directory.Run
) -> None:
  """Takes the store's run lock in the name of the run directory."""
  queue_server.lock_store(
      transport,
      run,
      owner=run_directory.owner(run),
      place=f"{socket.gethostname()}:{run.workdir}",
  )


class Trainer:
  """The training loop, on process 0 of a trainer."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: run_directory.Run,
      cluster: cluster_lib.Cluster,
      closing: contextlib.ExitStack,
  ):
    """Restores the newest checkpoint, or starts at step 0.

    Args:
      config: config of the run.
      run: directory and identity of the run.
      cluster: the processes of this trainer.
      closing: stack on which the parts register their `close`.

    Raises:
      ValueError: a setting or a file does not fit.
    """
    self._config = config
    saved = self._build(run, cluster, closing)
    self._step = int(self._work.state.step)
    self._saved_step = self._checkpointer.latest_step()
    # (step, journal position) of the checkpoints on disk.
    self._applied_history = [tuple(p) for p in saved.get("applied_history", ())]
    # Why training ended before its last step. Raising `train.num_steps`
    # resumes such a run.
    same_end = saved.get("num_steps") == config.train.num_steps
    self._stopped_by = saved.get("stopped_by") if same_end else None
    self._started = self._saved_at = time.monotonic()
    self._save_due = False

  def _build(
      self,
      run: run_directory.Run,
      cluster: cluster_lib.Cluster,
      closing: contextlib.ExitStack,
  ) -> dict[str, Any]:
    """Builds the parts; returns the newest checkpoint's host state, or {}."""
    config = self._config
    events = metrics_lib.EventLog(run.workdir / "events.jsonl", role="trainer")
    closing.callback(events.close)
    policy = policy_lib.make_policy(config, run.workdir)
    self._checkpointer = _make_checkpointer(config, run, cluster, events)
    closing.callback(self._checkpointer.close)
    if math.prod(config.mesh.values()) > 1:
      shards = sizes.sharding_text(config, policy.model.config)
      logging.info("mesh %s:\n%s", dict(config.mesh), shards)
    self._work, saved = device_work.make_work(
        config, run, policy, cluster, self._checkpointer
    )
    closing.callback(self._work.close)
    if saved:
      events.write("restored", f"checkpoint of step {self._work.state.step}")
    else:
      _check_is_new(config, run)
    epoch = run_directory.next_epoch(run)
    logging.info("trainer epoch %d on %s", epoch, jax.devices())
    settings = agreement.encode(agreement.describe(config, run, policy), run)

    def announce(transport: transport_base.Transport) -> None:
      lock_store(transport, run)
      agreement.put(transport, settings)

    connect = functools.partial(publication.connect, config, run)
    queue = queue_server.QueueServer(
        config,
        run,
        make_transport=connect,
        order=make_prompt_order(config, policy),
        epoch=epoch,
        announce=announce,
        on_event=events.write,
        saved=saved.get("data"),
    )
    closing.callback(queue.close)
    self._journal = queue.journal
    mesh = sharding.own_mesh(sharding.make_mesh(config.mesh))
    scorer = reward_judge.for_trainer(
        config, run.workdir, policy, events.write, mesh=mesh
    )
    closing.callback(scorer.close)
    self._service = service_lib.ReplayService(
        config,
        server=queue,
        buffer=make_buffer(config, policy, mesh),
        vocab_size=policy.model.config.vocab_size,
        on_event=events.write,
        score_groups=scorer.score,
        saved=saved.get("data"),
    )
    self._batch_maker = batches.BatchMaker(
        config, policy.tokenizer, self._service.buffer, self._work
    )
    evaluator = reward_judge.make_evaluator(
        config, run.workdir, policy, events.write, mesh=mesh
    )
    closing.callback(evaluator.close)
    self._recorder = recorder_lib.Recorder(
        config,
        run,
        epoch=epoch,
        queue=queue,
        tokenizer=policy.tokenizer,
        judge=evaluator.judge,
    )
    # Only the main thread may set a signal handler.
    signal.signal(signal.SIGUSR1, lambda *_: self._recorder.capture_profile())
    closing.callback(self._recorder.close)
    if saved:
      self._recorder.set_state(saved["recorder"])
    self._publisher = publication.Publisher(
        config,
        run,
        epoch=epoch,
        params=self._work.state.params,
        base_name=self._work.base,
        peers=self._work.peers,
        recorder=self._recorder,
    )
    closing.callback(self._publisher.close)
    best = None
    if config.checkpoint.keep_best:
      best = evaluations_lib.BestModel(run.workdir, policy)
    self._evaluations = evaluations_lib.Evaluations(
        config, evaluator, self._recorder, best
    )
    closing.callback(self._evaluations.close)
    self._guards = guards_lib.Guards(
        config, saved.get("guards"), backend=jax.default_backend()
    )
    rows.write_report(policy.task, run.workdir, events.write)
    queue.start()
    return saved

  def run(self, should_stop: Callable[[], bool]) -> bool:
    """Trains to the last step; returns False if interrupted, after saving.

    Raises:
      FloatingPointError: non-finite step; the message has step and prompts.
      DeadlineExceededError: searchers or store sent nothing in time.
    """
    recorder, num_steps = self._recorder, self._config.train.num_steps
    self._publish_first()
    if not recorder.has_result("before"):
      if self._step:
        recorder.event(
            "evaluation_lost",
            "eval.json lacks the evaluation before training; using that of"
            f" step {self._step}",
        )
      # Open the queue first: searchers compile and sample meanwhile.
      self._service.open(self._step)
      if not self._evaluate("before", should_stop):
        return self._interrupt()
    elif self._is_evaluation_missing():
      if not self._evaluate("", should_stop):
        return self._interrupt()
    running = None
    while running or (self._step < num_steps and self._stopped_by is None):
      running = running or self._wait_and_start(should_stop)
      if running is None:
        return self._interrupt()
      draw, metrics = running
      self._publish_if_due(metrics)
      # Dispatch the next step before reading this one's metrics: the devices
      # need not wait for the host.
      running = self._start_ahead(should_stop)
      with recorder.span("step", step=self._step):
        metrics = jax.device_get(metrics)
      self._end_step(draw, {k: float(v) for k, v in metrics.items()})
      if not self._evaluate_and_save_if_due(should_stop):
        return self._interrupt()
      if should_stop() and running is None:
        return self._interrupt()
    return self._finish(should_stop)

  @property
  def _publishes_late(self) -> bool:
    """With a lag, params are published once their round's data has arrived."""
    return train_step.keeps_params(self._config)

  def _publish_first(self) -> None:
    """Publishes the params that the current round is to be sampled with."""
    version, field = self._step, "params"
    if self._publishes_late:
      every = self._config.publish.every_steps
      version = max(version - 1, 0) // every * every
      field = "sampling_params"
    self._work.publish(self._publisher.submit, version, field)
    deadline_s = max(_PUBLISH_S, 2 * self._config.store.deadline_s)
    self._publisher.wait(version, deadline_s)

  def _publish_if_due(self, metrics: dict[str, jax.Array]) -> None:
    """Publishes the step in progress, provided it turns out finite."""
    done = self._step + 1
    every, last = self._config.publish.every_steps, self._config.train.num_steps
    if self._publishes_late or (done % every and done != last):
      return
    # The publisher's thread reads `nonfinite`: the loop does not wait for the
    # devices. A skipped step leaves the params unchanged and is published all
    # the same, since searchers may be waiting for its version.
    skips = self._config.train.nonfinite == "skip"
    nonfinite = 0 if skips else metrics["nonfinite"]
    self._work.publish(
        functools.partial(self._publisher.submit, nonfinite=nonfinite), done
    )

  def _wait_and_start(self, should_stop: Callable[[], bool]) -> Running | None:
    """Waits for the step's data and starts it; returns None if stopped."""
    with self._recorder.span("wait_fresh", step=self._step):
      begun = self._begin(self._step, should_stop)
    return self._start(self._step) if begun else None

  def _start_ahead(self, should_stop: Callable[[], bool]) -> Running | None:
    """Starts the next step unless something must happen before it."""
    done = self._step + 1
    self._save_due = self._is_save_due(done)
    if (
        done >= self._config.train.num_steps
        # Evaluations and saves must see params and buffer between two steps.
        or self._evaluations.is_due(done)
        or self._save_due
        or should_stop()
        or self._stopped_by is not None
        or not self._service.is_ready(done)
        or not self._begin(done, should_stop)
    ):
      return None
    return self._start(done)

  def _begin(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Waits for the step's data; with a lag, opens the next round."""
    begun = self._service.begin_step(step, should_stop)
    if begun and self._publishes_late:
      if step % self._config.publish.every_steps == 0:
        self._work.publish(self._publisher.submit, step)
      self._service.open_next(step)
    return begun

  def _start(self, step: int) -> Running:
    """Draws a batch and dispatches the step."""
    train = self._config.train
    with self._recorder.span("draw", step=step):
      draw = self._service.draw(
          train.prompts_per_batch, train.completions_per_prompt, step
      )
      self._service.mark_trained(draw)
      batch = self._batch_maker.make(draw)
    with self._recorder.span("step", step=step):
      return draw, self._work.train(batch)

  def _end_step(self, draw: buffer_lib.Draw, metrics: dict[str, float]) -> None:
    """Checks and records a finished step."""
    step = self._step
    if metrics["nonfinite"]:
      message = (
          f"step {step}: loss {metrics['loss']}, gradient norm"
          f" {metrics['grad_norm']}; prompts"
          f" {sorted(set(draw.prompt_ids.tolist()))}, versions"
          f" {int(draw.versions.min())} to {int(draw.versions.max())}"
      )
      if self._config.train.nonfinite == "stop":
        raise FloatingPointError(message)
      self._recorder.event("step_skipped", message)
    self._batch_maker.flush()
    self._step = step + 1
    for alarm in self._guards.check_step(step, metrics):
      self._on_alarm(alarm)
    with self._recorder.span("record", step=step):
      self._recorder.step(step, metrics, draw, self._service)

  def _is_save_due(self, done: int) -> bool:
    c = self._config.checkpoint
    if c.every_steps and done % c.every_steps == 0:
      return True
    return bool(c.every_s) and time.monotonic() - self._saved_at >= c.every_s

  def _is_evaluation_missing(self) -> bool:
    """Tells whether an earlier process ended before evaluating this step."""
    return (
        0 < self._step < self._config.train.num_steps
        and self._evaluations.is_due(self._step)
        and not self._recorder.has_evaluation(self._step)
    )

  def _evaluate_and_save_if_due(self, should_stop: Callable[[], bool]) -> bool:
    """Returns False if an evaluation was interrupted."""
    done = self._step
    self._checkpointer.check()
    self._check_accuracy(self._evaluations.take())
    limit_s = self._config.train.wall_clock_limit_s
    passed_s = time.monotonic() - self._started
    if limit_s and passed_s > limit_s and self._stopped_by is None:
      self._stopped_by = "wall_clock_limit_s"
      self._recorder.event(
          "limit", f"step {done}: config.train.wall_clock_limit_s={limit_s}"
      )
    if done >= self._config.train.num_steps:
      return True
    if self._evaluations.is_due(done) and not self._evaluate("", should_stop):
      return False
    if self._save_due:
      self._save(wait=False)
    return True

  def _evaluate(self, name: str, should_stop: Callable[[], bool]) -> bool:
    """Evaluates, or starts to in a thread; returns False if interrupted."""
    if not name and self._evaluations.beside:
      self._evaluations.start(self._step, self._work.gather_model())
      return True
    result = self._evaluations.run(
        name, self._step, self._work.gather_model(), should_stop
    )
    if result is not None:
      self._check_accuracy((self._step, result))
    return result is not None

  def _check_accuracy(self, found: tuple[int, dict[str, Any]] | None) -> None:
    """Passes the (step, result) of an evaluation, if any, to the guards."""
    if found is not None:
      step, result = found
      for alarm in self._guards.check_accuracy(
          step, result["pass_at_1"], result["split"]
      ):
        self._on_alarm(alarm)

  def _on_alarm(self, alarm: guards_lib.Alarm) -> None:
    guards = self._config.guards
    action = guards.action
    self._recorder.event("guard", f"{alarm.message} ({action})")
    if action == "stop":
      self._stopped_by = f"guard {alarm.name}"
    # A gap between trainer and sampler is a bug: no learning rate fixes it.
    elif action == "lower_learning_rate" and alarm.name != "logprob_gap":
      self._work.scale_learning_rate(guards.learning_rate_factor)

  def _save(self, *, wait: bool) -> None:
    """Saves a checkpoint and drops journal segments that none needs any more.

    One process skips a periodic save that fails (a full disk) with an event:
    the journal still covers it. Several processes end, and restart from the
    previous checkpoint.
    """
    if self._saved_step == self._step:
      return
    self._saved_at = time.monotonic()
    with self._recorder.span("checkpoint", step=self._step):
      data = self._service.get_state()
      history = [*self._applied_history, (self._step, data["applied"])]
      host_state = {
          "data": data,
          "applied_history": [list(pair) for pair in history],
          "guards": self._guards.get_state(),
          "recorder": self._recorder.get_state(),
          "stopped_by": self._stopped_by,
          "num_steps": self._config.train.num_steps,
      }
      try:
        self._work.save(self._step, host_state, wait=wait)
      except OSError as error:
        if wait or not self._work.may_leave_out:
          raise
        self._recorder.event("checkpoint_failed", str(error))
        return
    self._saved_step = self._step
    # Keep the journal from the oldest restorable checkpoint on.
    complete = set(self._checkpointer.newest_steps())
    covered = [position for step, position in history if step in complete]
    self._applied_history = [
        (step, position)
        for step, position in history
        if step in complete or step == self._saved_step
    ]
    if covered:
      self._journal.truncate_before(min(covered))

  def _interrupt(self) -> bool:
    self._service.stop_searchers(_INTERRUPT_S)
    self._save(wait=True)
    self._recorder.event("interrupted", f"saved at step {self._step}")
    # It may wait for a batch of completions, or for one that hangs.
    self._evaluations.close()
    return False

  def _finish(self, should_stop: Callable[[], bool]) -> bool:
    recorder = self._recorder
    recorder.phase("finish")
    recorder.train_ended()
    with recorder.span("wait_searchers"):
      ledger = self._service.finish(self._step, _FINISH_S)
      self._check_accuracy(self._evaluations.finish())
    self._save(wait=True)
    # A run with a raised `train.num_steps` has the result of an earlier step.
    if not recorder.has_result("after", self._step):
      if not self._evaluate("after", should_stop):
        recorder.event("interrupted", "during the last evaluation")
        return False
    recorder.finish(self._step, ledger, self._stopped_by)
    return True


def make_follower(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    cluster: cluster_lib.Cluster,
    closing: contextlib.ExitStack,
) -> device_work.Follower:
  """Returns the part that the trainer's other processes run."""
  events = metrics_lib.EventLog(run.workdir / "events.jsonl", role="trainer")
  closing.callback(events.close)
  checkpointer = _make_checkpointer(config, run, cluster, events)
  closing.callback(checkpointer.close)
  policy = policy_lib.make_policy(config, run.workdir)
  work, _ = device_work.make_work(config, run, policy, cluster, checkpointer)
  closing.callback(work.close)
  return device_work.Follower(cluster, work)


def _make_checkpointer(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    cluster: cluster_lib.Cluster,
    events: metrics_lib.EventLog,
) -> checkpoint.Checkpointer:
  return checkpoint.Checkpointer(
      bucket.place(run.workdir / "checkpoints"),
      keep=config.checkpoint.keep,
      keep_every_steps=config.checkpoint.keep_every_steps,
      keep_every_s=config.checkpoint.keep_every_s,
      barrier=cluster.save_barrier(config.trainer.save_deadline_s),
      on_event=events.write,
  )


def make_prompt_order(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> prompt_order.PromptOrder:
  """Returns the order of the task's training prompts."""
  size = policy.task.num_prompts(tasks_base.TRAIN)
  return prompt_order.PromptOrder(size, seed=config.seed)


def make_buffer(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> buffer_lib.ReplayBuffer:
  """Returns an empty buffer; `policy` is for `replay_filter.similarity`."""
  embed, content_mask = None, None
  if config.replay_filter.similarity != "none":
    content_mask = functools.partial(
        tokenizer_lib.content_mask, policy.tokenizer
    )
  if config.replay_filter.similarity == "cosine":
    embed = reward_judge.make_embed(config, policy, mesh)
  return buffer_lib.ReplayBuffer(
      config,
      reward_temperature=schedules.reward_temperature(
          config.replay, per_round_steps=config.train.per_round_steps
      ),
      embed=embed,
      content_mask=content_mask,
  )
