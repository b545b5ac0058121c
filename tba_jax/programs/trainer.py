# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `trainer` program: builds the trainer from a config and runs it."""

from collections.abc import Callable, Sequence
import functools
import math
import pathlib
import signal
import socket
import sys
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.config import validate
from tba_jax.models import hf
from tba_jax.models import sequence
from tba_jax.monitor import metrics as metrics_lib
from tba_jax.monitor import recorder as recorder_lib
from tba_jax.monitor import run_directory
from tba_jax.programs import roles
from tba_jax.programs import searcher
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import journal as journal_lib
from tba_jax.replay import ledger as ledger_lib
from tba_jax.replay import messages
from tba_jax.replay import prompt_order
from tba_jax.replay import queue_server
from tba_jax.replay import scheduler
from tba_jax.replay import service as service_lib
from tba_jax.replay import similarity
from tba_jax.system import bucket
from tba_jax.system import processes
from tba_jax.tasks import rows_task
from tba_jax.training import agreement
from tba_jax.training import batches
from tba_jax.training import checkpoint
from tba_jax.training import cluster as cluster_lib
from tba_jax.training import device_work
from tba_jax.training import evaluations as evaluations_lib
from tba_jax.training import evaluator as evaluator_lib
from tba_jax.training import guards as guards_lib
from tba_jax.training import lora
from tba_jax.training import periods as periods_lib
from tba_jax.training import policy as policy_lib
from tba_jax.training import publication
from tba_jax.training import reference as reference_lib
from tba_jax.training import reward_judge
from tba_jax.training import schedules
from tba_jax.training import shard_report
from tba_jax.training import sharding
from tba_jax.training import train_step
from tba_jax.transport import base as transport_base

# How much and how often the trainer does what it does.


# The trainer: await data, draw, step, publish, checkpoint, evaluate.
#
# The loop of `Trainer.run` reads in that order. The device works on a step
# while
# the host draws the next batch, wherever its data is there already.


_FINISH_S = 15.0
_PUBLISH_S = 60.0


class Trainer:
  """Owns the train state; everything else is handed in."""

  def __init__(
      self,
      *,
      work: device_work.DeviceWork,
      service: service_lib.ReplayService,
      batch_maker: batches.BatchMaker,
      publisher: publication.Publisher,
      checkpointer: checkpoint.Checkpointer,
      journal: journal_lib.Journal,
      evaluations: evaluations_lib.Evaluations,
      guards: guards_lib.Guards,
      recorder: recorder_lib.Recorder,
      periods: periods_lib.Periods,
      applied_history: list[tuple[int, int]],
      stopped_by: str | None = None,
  ):
    """Takes the parts, restored or new; `run` starts.

    Args:
      work: owns the train state; what the devices do.
      service: replay, with its drain running.
      batch_maker: from draws to batches.
      publisher: of versions.
      checkpointer: of this run.
      journal: cut as checkpoints cover it.
      evaluations: before, while and after training.
      guards: against collapse.
      recorder: writes metrics, status, samples and results.
      periods: see there.
      applied_history: (step, journal position) of the checkpoints on disk.
      stopped_by: what ended the training before its last step, where only the
        last evaluation is left to do.
    """
    self._work = work
    self._service = service
    self._batch_maker = batch_maker
    self._publisher = publisher
    self._checkpointer = checkpointer
    self._journal = journal
    self._evaluations = evaluations
    self._guards = guards
    self._recorder = recorder
    self._periods = periods
    self._applied_history = list(applied_history)
    self._step = int(work.state.step)
    self._saved_step = checkpointer.latest_step()
    self._started = time.monotonic()
    self._stopped_by = stopped_by
    self._saved_at = time.monotonic()
    self._save_due = False

  def run(self, should_stop: Callable[[], bool]) -> bool:
    """Trains to the last step; returns False where it was interrupted.

    An interrupted run is saved, and goes on where it was.

    Raises:
      FloatingPointError: a loss that is not finite; names step and prompts.
      DeadlineExceededError: nothing came from searchers or store in time.
    """
    periods, note = self._periods, self._recorder
    self._publish_first()
    if not note.has_result("before"):
      # Admission opens first: searchers compile and sample meanwhile.
      self._service.open(self._step)
      if not self._evaluate("before", should_stop):
        return self._interrupt()
    elif self._is_evaluation_missing():
      if not self._evaluate("", should_stop):
        return self._interrupt()
    prepared = None
    while self._step < periods.num_steps and (
        self._stopped_by is None or prepared is not None
    ):
      if prepared is None:
        prepared = self._prepare(should_stop)
      if prepared is None:
        return self._interrupt()
      draw, batch = prepared
      with note.span("step", step=self._step):
        metrics = self._work.train(batch)
      prepared = self._after_dispatch(should_stop)
      with note.span("step", step=self._step):
        metrics = jax.device_get(metrics)
      self._after_step(draw, batch, metrics)
      if not self._periodic(should_stop):
        return self._interrupt()
      if should_stop() and prepared is None:
        return self._interrupt()
    return self._finish(should_stop)

  def _prepare(
      self, should_stop: Callable[[], bool]
  ) -> tuple[buffer_lib.Draw, types.Batch] | None:
    """Waits for the step's data and draws; None where it was stopped."""
    note = self._recorder
    with note.span("wait_fresh", step=self._step):
      begun = self._begin(self._step, should_stop)
    return self._draw(self._step) if begun else None

  def _publish_first(self) -> None:
    """Publishes; with a lag what the rest of a round must be sampled with."""
    version, field = self._step, "params"
    if self._periods.publish_late:
      every = self._periods.publish_every
      version = max(version - 1, 0) // every * every
      field = "sampling_params"
    self._work.publish(self._publisher.submit, version, field)
    self._publisher.wait(version, _PUBLISH_S)

  def _begin(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Waits for the step's data; with a lag, opens the round after it."""
    begun = self._service.begin_step(step, should_stop)
    if begun and self._periods.publish_late:
      if step % self._periods.publish_every == 0:
        self._work.publish(self._publisher.submit, step)
      self._service.open_next(step)
    return begun

  def _draw(self, step: int) -> tuple[buffer_lib.Draw, types.Batch]:
    with self._recorder.span("draw", step=step):
      draw = self._service.draw(
          self._periods.num_prompts, self._periods.num_completions, step
      )
      self._service.mark_trained(draw)
      ref_params = self._work.state.ref_params
      batch = self._batch_maker.make(draw, step, ref_params)
      return draw, batch

  def _after_dispatch(
      self, should_stop: Callable[[], bool]
  ) -> tuple[buffer_lib.Draw, types.Batch] | None:
    """While the device works on the step: publish it, draw the next batch."""
    done = self._step + 1
    periods = self._periods
    self._save_due = self._is_save_due(done)
    due = done % periods.publish_every == 0 or done == periods.num_steps
    if due and not periods.publish_late:
      self._work.publish(self._publisher.submit, done)
    # A checkpoint or an evaluation must see the buffer between two steps.
    if done >= periods.num_steps or self._is_due(done) or should_stop():
      return None
    if self._stopped_by is not None:
      return None
    if not self._service.is_ready(done) or not self._begin(done, should_stop):
      return None
    return self._draw(done)

  def _after_step(
      self,
      draw: buffer_lib.Draw,
      batch: types.Batch,
      metrics: dict[str, np.ndarray],
  ) -> None:
    step = self._step
    metrics = {name: float(value) for name, value in metrics.items()}
    if not math.isfinite(metrics["loss"]):
      raise FloatingPointError(
          f"step {step}: the loss is {metrics['loss']}; prompts"
          f" {sorted(set(draw.prompt_ids.tolist()))}, versions"
          f" {int(draw.versions.min())} to {int(draw.versions.max())}"
      )
    self._batch_maker.flush()
    self._step = step + 1
    for alarm in self._guards.check_step(step, metrics):
      self._on_alarm(alarm)
    with self._recorder.span("record", step=step):
      self._recorder.step(step, metrics, draw, self._service)

  def _is_due(self, done: int) -> bool:
    evaluates = self._evaluations.is_due(done) and not self._evaluations.beside
    return evaluates or self._save_due

  def _is_save_due(self, done: int) -> bool:
    every = self._periods.checkpoint_every
    every_s = self._periods.checkpoint_every_s
    if every and done % every == 0:
      return True
    return bool(every_s) and time.monotonic() - self._saved_at >= every_s

  def _is_evaluation_missing(self) -> bool:
    """Tells whether an earlier process ended before it evaluated this step."""
    return (
        0 < self._step < self._periods.num_steps
        and self._evaluations.is_due(self._step)
        and not self._recorder.has_evaluation(self._step)
    )

  def _periodic(self, should_stop: Callable[[], bool]) -> bool:
    """Evaluates and saves where that is due; False where it was stopped."""
    periods, done = self._periods, self._step
    self._checkpointer.check()
    self._on_evaluation(self._evaluations.take())
    limit = periods.wall_clock_limit_s
    passed_s = time.monotonic() - self._started
    if limit and passed_s > limit and self._stopped_by is None:
      self._stopped_by = "wall_clock_limit_s"
      self._recorder.event(
          "limit", f"step {done}: config.train.wall_clock_limit_s={limit}"
      )
    if done >= periods.num_steps:
      return True
    if self._evaluations.is_due(done) and not self._evaluate("", should_stop):
      return False
    if self._save_due:
      self._save(wait=False)
    return True

  def _evaluate(self, name: str, should_stop: Callable[[], bool]) -> bool:
    """Evaluates as it is due; False where it was stopped."""
    if not name and self._evaluations.beside:
      self._evaluations.start(self._step, self._work.gather_model())
      return True
    result = self._evaluations.run(
        name, self._step, self._work.gather_model(), should_stop
    )
    if result is not None:
      self._on_evaluation((self._step, result))
    return result is not None

  def _on_evaluation(self, found: tuple[int, dict[str, Any]] | None) -> None:
    """Shows the guards an evaluation, where there is one."""
    if found is not None:
      step, result = found
      for alarm in self._guards.check_accuracy(step, result["pass_at_1"]):
        self._on_alarm(alarm)

  def _on_alarm(self, alarm: guards_lib.Alarm) -> None:
    self._recorder.event("guard", f"{alarm.message} ({self._guards.action})")
    # A gap between trainer and sampler is a defect: no learning rate mends it.
    if self._guards.action == "stop":
      self._stopped_by = f"guard {alarm.name}"
    elif (
        self._guards.action == "lower_learning_rate"
        and alarm.name != "logprob_gap"
    ):
      self._work.scale_learning_rate(self._guards.learning_rate_factor)

  def _save(self, *, wait: bool) -> None:
    """Saves a checkpoint of this step, and drops journal that none needs.

    A periodic one that cannot be written (a full disk) is told and left out:
    the journal keeps what it would have covered. Not where the trainer is
    several processes, which then end, and start again from the one before.
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
          "num_steps": self._periods.num_steps,
      }
      try:
        self._work.save(self._step, host_state, wait=wait)
      except OSError as error:
        if wait or not self._work.may_leave_out:
          raise
        self._recorder.event("checkpoint_failed", str(error))
        return
    self._saved_step = self._step
    self._applied_history = history
    self._drop_journal()

  def _drop_journal(self) -> None:
    """Keeps the journal behind the oldest checkpoint that may be restored."""
    complete = set(self._checkpointer.newest_steps())
    covered = [p for step, p in self._applied_history if step in complete]
    self._applied_history = [
        pair
        for pair in self._applied_history
        if pair[0] in complete or pair[0] == self._saved_step
    ]
    if covered:
      self._journal.truncate_before(min(covered))

  def _interrupt(self) -> bool:
    self._evaluations.close()
    self._service.stop_searchers(5.0)
    self._save(wait=True)
    self._recorder.event("interrupted", f"saved at step {self._step}")
    return False

  def _finish(self, should_stop: Callable[[], bool]) -> bool:
    note = self._recorder
    note.phase("finish")
    note.train_ended()
    with note.span("wait_searchers"):
      ledger = self._service.finish(self._step, _FINISH_S)
      self._on_evaluation(self._evaluations.finish())
    self._save(wait=True)
    # A longer run of the same directory has one of an earlier step.
    if not note.has_result("after", self._step):
      if not self._evaluate("after", should_stop):
        note.event("interrupted", "during the last evaluation")
        return False
    note.finish(self._step, ledger, self._stopped_by)
    return True


# Parts of the training loop, each made from its section of a config.


def make_reference(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    params: types.PyTree,
    mesh: jax.sharding.Mesh,
) -> reference_lib.Reference:
  """Returns the reference policy, which starts from the params on a mesh."""
  moves = config.reference.mode != "fixed"
  return reference_lib.Reference(
      policy.model,
      params,
      temperature=config.sampling.temperature,
      every_steps=config.reference.every_steps if moves else 0,
      # No step donates the base of adapters: it is the reference too.
      copy=policy.adapters is None,
      split_tokens=lambda fn: sequence.split_tokens(
          fn, mesh, *sharding.token_axes(config.sharding)
      ),
  )


def log_sharding(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> None:
  """Logs what of the policy a mesh of several devices does not split."""
  if math.prod(config.mesh.values()) == 1:
    return
  shape = policy.model.config
  found = shard_report.of_leaves(
      shard_report.model_leaves(shape), config.sharding, config.mesh
  )
  logging.info(
      "mesh %s:\n%s",
      dict(config.mesh),
      shard_report.text(
          found,
          jnp.dtype(shape.param_dtype).itemsize,
          shard_report.length_rows(config),
      ),
  )


def init_state(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    params: types.PyTree,
    mesh: jax.sharding.Mesh,
) -> train_step.TrainState:
  """Returns the state before step 0 from the policy's params."""
  value_model = policy_lib.make_value_model(config, policy.model)
  value_params = policy_lib.load_value_params(config)
  if policy.adapters is not None:
    if value_model is not None and value_params is None:
      value_params = value_model.from_policy(params)
    params = jax.jit(policy.adapters.init)(jax.random.PRNGKey(config.seed))
  return train_step.init_state(
      config,
      policy.trained,
      params,
      mesh,
      value_model=value_model,
      value_params=value_params,
  )


def make_work(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    checkpointer: checkpoint.Checkpointer,
    cluster: cluster_lib.Cluster,
    secret: bytes,
) -> tuple[device_work.DeviceWork, batches.Placer, dict[str, Any]]:
  """Returns what a trainer's processes do together, and what was saved with it.

  Its state is the newest checkpoint's where there is one.
  """
  mesh = sharding.make_mesh(config.mesh)
  log_sharding(config, policy)
  shardings = sharding.param_shardings(
      mesh, config.sharding, policy.model.logical_axes
  )
  params = jax.device_put(
      policy_lib.initial_params(policy, config.seed, shardings), shardings
  )
  reference = make_reference(config, policy, params, mesh)
  whole = lora.make_whole(
      policy.adapters, policy.folder, config.seed, lambda: params
  )
  if checkpointer.latest_step() is None:
    state, saved = init_state(config, policy, params, mesh), {}
  else:
    state, saved = checkpointer.restore(abstract_state(config, policy, mesh))
    lora.check_base(saved.get("base", ""), whole.base)
  work = device_work.DeviceWork(
      state=state,
      train_step=make_train_step(config, policy, mesh, params),
      whole=whole,
      checkpointer=checkpointer,
      mesh=mesh,
      cluster=cluster,
      peers=publication.make_peers(
          config,
          _published(config, state.params),
          cluster,
          secret=secret,
          copy=_copier(config),
      ),
  )
  return work, make_placer(config, reference, mesh, cluster), saved


def abstract_state(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
) -> train_step.TrainState:
  """Returns shapes, dtypes and shardings of the state."""
  value_model = policy_lib.make_value_model(config, policy.model)
  return train_step.abstract_state(
      config, policy.trained, mesh, value_model=value_model
  )


def make_train_step(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
    params: types.PyTree,
) -> train_step.TrainStep:
  """Returns the jitted step of a config's objective.

  Args:
    config, policy: of the run.
    mesh: of the state.
    params: that training starts from, on the mesh; kept where they are the base
      of adapters.
  """
  return train_step.make_train_step(
      config,
      policy.model,
      mesh,
      value_model=policy_lib.make_value_model(config, policy.model),
      adapters=policy.adapters,
      base=None if policy.adapters is None else params,
  )


def make_batch_maker(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    buffer: buffer_lib.ReplayBuffer,
    placer: batches.Placer,
) -> batches.BatchMaker:
  """Returns the maker of batches."""
  counts = config.loss.include_stop_token
  uncounted_ids = () if counts else policy.tokenizer.stop_ids
  return batches.BatchMaker(buffer, placer, uncounted_ids)


def make_placer(
    config: ml_collections.ConfigDict,
    reference: reference_lib.Reference,
    mesh: jax.sharding.Mesh,
    cluster: cluster_lib.Cluster,
) -> batches.Placer:
  """Returns what puts batches onto a mesh, that of a cluster's processes."""
  num_prompts = config.train.prompts_per_batch
  shards = config.mesh.data * config.mesh.fsdp
  # Fresh groups miss their reference log-probs; drawn again, they have them.
  quarter = math.ceil(num_prompts / 4 / shards) * shards
  if cluster.num_processes > 1:
    place = sharding.make_spread(mesh, config.sharding)
  else:
    place = functools.partial(
        sharding.shard_batch, mesh=mesh, rules=config.sharding
    )
  return batches.Placer(
      reference,
      part_prompts=num_prompts
      if config.replay.recent_fraction == 1
      else quarter,
      place=place,
      gather=cluster.gatherer(mesh),
      tell=lambda **fields: cluster.broadcast("place", fields),
  )


def _published(
    config: ml_collections.ConfigDict, params: types.PyTree
) -> publication.Specs:
  """Returns what is published of params, which may be abstract."""
  expected = publication.expected_leaves(params)
  return publication.published_specs(expected, config.publish.dtype)


def _copier(
    config: ml_collections.ConfigDict,
) -> Callable[[types.PyTree], dict[str, jax.Array]]:
  """Returns what copies params as they are published, by path."""
  dtype = config.publish.dtype
  copy = jax.jit(functools.partial(publication.snapshot, dtype=dtype))
  return lambda params: publication.by_path(copy(params))


def make_evaluations(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    evaluator: evaluator_lib.Evaluator,
    workdir: pathlib.Path,
    recorder: recorder_lib.Recorder,
) -> evaluations_lib.Evaluations:
  """Returns what evaluates before, while and after training.

  In lockstep the steps wait, so that guards act at the same step in every run.
  So they do on several devices: two threads that start programs with
  collectives there may start them in another order on each.
  """

  def save(folder: pathlib.Path, params: types.PyTree) -> None:
    hf.save(folder, policy.model.config, params, policy.tokenizer)

  one_device = math.prod(config.mesh.values()) == 1
  return evaluations_lib.Evaluations(
      evaluator=evaluator,
      validator=evaluator.while_training(),
      best=evaluations_lib.BestModel(
          workdir / "best", save if config.checkpoint.keep_best else None
      ),
      recorder=recorder,
      periods=periods_lib.make_periods(config, policy.task),
      beside=config.evaluate.beside
      and not config.search.lockstep
      and one_device,
      deadline_s=config.evaluate.deadline_s,
  )


def stopped_by(
    config: ml_collections.ConfigDict, saved: dict[str, Any]
) -> str | None:
  """Returns what ended the run that is continued; None: nothing."""
  # A run that is made longer goes on in spite of it.
  same = saved.get("num_steps") == config.train.num_steps
  return saved.get("stopped_by") if same else None


def run_trainer(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the trainer of a run until its last step, a signal or an error.

  Args:
    config, workdir: of the run.
    operands: as `cluster_join.join`; none where the trainer is one process.
  """
  stop = processes.start_role()
  run = run_directory.open_run(workdir, config)
  try:
    joined = cluster_lib.join(config.trainer, operands, run.secret, run.tls)
    with joined as cluster:
      with _Trainer(config, run, cluster) as trainer:
        done = trainer.run(cluster.stopper(stop.is_set))
        cluster.end(processes.EXIT_OK if done else processes.EXIT_INTERRUPTED)
  except (FloatingPointError, ValueError) as error:
    # It would end in the same place again. A ValueError is a setting, a file or
    # a newer format that does not fit this machine or program.
    logging.exception("the trainer cannot go on")
    print(f"error: {error}", file=sys.stderr)
    return cluster_lib.status_of(error)
  except cluster_lib.Ended as end:
    return end.status
  return processes.EXIT_OK if done else processes.EXIT_INTERRUPTED


class _Trainer:
  """Builds the trainer's parts in the order in which they need each other."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: run_directory.Run,
      cluster: cluster_lib.Cluster,
  ):
    self._config = config
    self._run = run
    self._cluster = cluster
    self._closers: list[Callable[[], None]] = []

  def __enter__(self) -> Trainer | device_work.Follower:
    try:
      terms = agreement.Terms.make(self._config, self._run)
      agreement.hold_processes(self._cluster, terms, validate.check_hosts)
      if self._cluster.leads:
        self._take()
      self._cluster.begin()
      return self._build()
    except BaseException as error:
      self.__exit__(type(error), error, None)
      raise

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    if self._cluster.leaves_alone(error):
      return
    # What the others wait for first: closing a checkpointer needs them all.
    self._cluster.end(cluster_lib.status_of(error))
    while self._closers:
      self._closers.pop()()

  def _take(self) -> None:
    """Makes directory and store this trainer's, before anything is written."""
    workdir = str(self._run.workdir)
    lock = run_directory.lock(workdir, "trainer")
    self._closers.append(bucket.hold(lock, self._run.workdir).close)
    validate.check_resume(run_directory.load_config(workdir), self._config)
    transport = roles.transport_maker(self._config, self._run)()
    make_claim(self._run).take(transport)
    transport.close()

  def _build(self) -> Trainer | device_work.Follower:
    config, run = self._config, self._run
    events = metrics_lib.EventLog(run.workdir / "events.jsonl")
    self._closers.append(events.close)
    on_event = functools.partial(events.write, role="trainer")
    policy = policy_lib.make_policy(config, run.workdir)
    checkpointer = checkpoint.Checkpointer(
        bucket.place(run.workdir / "checkpoints"),
        keep=config.checkpoint.keep,
        keep_every_steps=config.checkpoint.keep_every_steps,
        keep_every_s=config.checkpoint.keep_every_s,
        barrier=self._cluster.save_barrier(config.trainer.save_deadline_s),
        on_event=on_event,
    )
    self._closers.append(checkpointer.close)
    work, placer, saved = make_work(
        config, policy, checkpointer, self._cluster, run.secret
    )
    self._closers.append(work.close)
    if not self._cluster.leads:
      return device_work.Follower(self._cluster, work, placer.put_along)
    epoch = run_directory.next_epoch(run)
    logging.info("trainer epoch %d on %s", epoch, jax.devices())
    if saved:
      on_event("restored", f"checkpoint of step {int(work.state.step)}")
    journal = self._make_journal(saved, on_event)
    drain, service = self._make_service(
        policy, journal, saved.get("data"), epoch, on_event
    )
    evaluator = reward_judge.evaluator_of(config, run.workdir, policy, on_event)
    self._closers += [drain.close, evaluator.close]
    recorder = self._make_recorder(policy, evaluator, drain, epoch, saved)
    make_transport = roles.transport_maker(config, run)
    publisher = make_publisher(
        config, run, epoch, work, make_transport, recorder, on_event
    )
    evaluations = make_evaluations(
        config, policy, evaluator, run.workdir, recorder
    )
    self._closers += [publisher.close, evaluations.close]
    rows_task.write_data_report(policy.task, run.workdir, on_event)
    drain.start()
    return Trainer(
        work=work,
        service=service,
        batch_maker=make_batch_maker(config, policy, service.buffer, placer),
        publisher=publisher,
        checkpointer=checkpointer,
        journal=journal,
        evaluations=evaluations,
        guards=guards_lib.Guards(config.guards, saved.get("guards")),
        recorder=recorder,
        periods=periods_lib.make_periods(config, policy.task),
        applied_history=[tuple(p) for p in saved.get("applied_history", ())],
        stopped_by=stopped_by(config, saved),
    )

  def _make_journal(
      self, saved: dict[str, Any], on_event: Callable[[str, str], None]
  ) -> journal_lib.Journal:
    journal = journal_lib.Journal(
        self._run.workdir / "replay",
        max_segment_bytes=int(self._config.replay.max_segment_mb * 1e6),
        min_position=saved["data"]["applied"] if saved else 0,
        on_event=on_event,
    )
    self._closers.append(journal.close)
    return journal

  def _make_recorder(
      self,
      policy: policy_lib.Policy,
      evaluator: evaluator_lib.Evaluator,
      drain: queue_server.Drain,
      epoch: int,
      saved: dict[str, Any],
  ) -> recorder_lib.Recorder:
    recorder = recorder_lib.Recorder(
        self._config,
        self._run,
        epoch=epoch,
        queue=drain,
        tokenizer=policy.tokenizer,
        judge=evaluator.judge,
    )
    self._closers.append(recorder.close)
    # The main thread alone may set a handler.
    signal.signal(signal.SIGUSR1, lambda *_: recorder.capture_profile())
    if saved:
      recorder.set_state(saved["recorder"])
    return recorder

  def _make_service(
      self,
      policy: policy_lib.Policy,
      journal: journal_lib.Journal,
      saved: dict[str, Any] | None,
      epoch: int,
      on_event: Callable[[str, str], None],
  ) -> tuple[queue_server.Drain, service_lib.ReplayService]:
    config, run = self._config, self._run
    buffer = make_buffer(config, policy)
    order = make_prompt_order(config, policy)
    ledger = ledger_lib.Ledger()
    applied, watermarks = journal.start, {}
    if saved is not None:
      buffer.set_state(saved["buffer"])
      order.set_state(saved["order"])
      ledger.set_state(saved["ledger"])
      applied, watermarks = saved["applied"], saved["watermarks"]
    flow = make_flow(config)
    drain = queue_server.Drain(
        roles.transport_maker(config, run),
        journal=journal,
        grants=scheduler.Grants(
            order,
            prompts_per_round=config.search.prompts_per_round,
            version_of=flow.version_of,
        ),
        lease_s=config.search.lease_s,
        watermarks=watermarks,
        replay_from=applied,
        run_id=run.run_id,
        secret=run.secret,
        epoch=epoch,
        partition=roles.PARTITION,
        claim=make_announcement(config, run, policy),
        on_event=on_event,
    )
    scorer = reward_judge.of_trainer(config, run.workdir, policy, on_event)
    self._closers.append(scorer.close)
    service = service_lib.ReplayService(
        drain=drain,
        buffer=buffer,
        order=order,
        ledger=ledger,
        flow=flow,
        applied=applied,
        watermarks=watermarks,
        check_group=functools.partial(
            messages.check_group,
            vocab_size=policy.model.config.vocab_size,
            max_prompt_tokens=config.sampling.max_prompt_tokens,
        ),
        on_event=on_event,
        score_groups=scorer.score,
    )
    return drain, service


def make_flow(config: ml_collections.ConfigDict) -> scheduler.Flow:
  """Returns the admission that a config asks for."""
  return scheduler.Flow(
      prompts_per_step=config.search.prompts_per_step,
      warm_prompts=math.ceil(
          config.replay.warm_start_completions
          / config.search.samples_per_prompt
      ),
      lead_steps=config.search.lead_steps,
      num_steps=config.train.num_steps,
      lockstep=config.search.lockstep,
      wait_for_fresh=config.search.wait_for_fresh,
      starvation_s=config.search.starvation_s,
      round_prompts=config.rounds.mini_batches * config.train.prompts_per_batch,
      round_steps=train_step.round_steps(config),
      lag_rounds=config.rounds.lag_rounds,
  )


def make_claim(run: run_directory.Run) -> queue_server.StoreClaim:
  """Returns what makes a store that of a run directory's trainer."""
  return queue_server.StoreClaim(
      run_id=run.run_id,
      secret=run.secret,
      owner=run_directory.owner(run),
      place=f"{socket.gethostname()}:{run.workdir}",
  )


def make_announcement(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    policy: policy_lib.Policy,
) -> Callable[[transport_base.Transport], None]:
  """Returns what a trainer does to a new store: claims it, tells its terms."""
  taken = make_claim(run)
  terms = agreement.Terms.make(config, run, policy)

  def announce(transport: transport_base.Transport) -> None:
    taken.take(transport)
    agreement.put(transport, terms, run_id=run.run_id, secret=run.secret)

  return announce


def make_prompt_order(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> prompt_order.PromptOrder:
  """Returns the order over the task's training prompts."""
  return prompt_order.PromptOrder(
      policy.task.num_prompts(searcher.SPLIT), seed=config.seed
  )


def make_buffer(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy | None = None
) -> buffer_lib.ReplayBuffer:
  """Returns the empty buffer of a config.

  Args:
    config: reads `replay`, `replay_filter`, `sampling` and `seed`.
    policy: its tokenizer and task are needed where sentence embeddings are
      compared.
  """
  replay = config.replay
  return buffer_lib.ReplayBuffer(
      capacity_per_prompt=replay.capacity_per_prompt,
      capacity=replay.capacity,
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=config.sampling.max_completion_tokens,
      recent_fraction=replay.recent_fraction,
      recent_window_steps=replay.recent_window_steps,
      selection=replay.selection,
      reward_temperature=schedules.reward_temperature(
          replay, per_round_steps=config.train.per_round_steps
      ),
      dedupe=replay.dedupe,
      seed=config.seed,
      rules=_make_rules(config.replay_filter, policy),
  )


def _make_rules(
    c: ml_collections.ConfigDict, policy: policy_lib.Policy | None
) -> similarity.AdmissionRules:
  """Returns who the buffer takes in, by `config.replay_filter`."""
  make = None
  if c.similarity == "edit":
    make = lambda table: similarity.EditDistance(table, c.similarity_limit)
  elif c.similarity == "cosine":
    embed = policy_lib.make_embed(policy)
    make = lambda table: similarity.Cosine(embed, c.similarity_limit)
  return similarity.AdmissionRules(
      duplicates=c.duplicates,
      evict=c.evict,
      freeze_step=c.freeze_step,
      make_similarity=make,
  )


def make_publisher(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    epoch: int,
    work: device_work.DeviceWork,
    make_transport: Callable[[], transport_base.Transport],
    recorder: recorder_lib.Recorder,
    on_event: Callable[[str, str], None],
) -> publication.Publisher:
  """Returns the publisher of a run's params, its thread started."""
  specs = publication.published_specs(
      publication.expected_leaves(work.state.params), config.publish.dtype
  )
  return publication.Publisher(
      make_transport,
      epoch=epoch,
      run_id=run.run_id,
      secret=run.secret,
      base_name=work.base,
      carriers=publication.make_write_carriers(config, run, specs, work.peers),
      dtype=config.publish.dtype,
      keep_versions=config.publish.keep_versions,
      on_event=on_event,
      span=functools.partial(recorder.span, lane="publish"),
  )
