# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `trainer` and `searcher` programs: build the parts, run the role."""

from collections.abc import Callable, Sequence
import functools
import sys
from typing import Any

from absl import logging
import jax
import ml_collections

from tba_jax import agreement
from tba_jax import bucket
from tba_jax import checkpoint as checkpoint_lib
from tba_jax import cluster as cluster_lib
from tba_jax import cluster_join
from tba_jax import data_report
from tba_jax import device_work
from tba_jax import evaluator as evaluator_lib
from tba_jax import guards as guards_lib
from tba_jax import ledger as ledger_lib
from tba_jax import local_mesh
from tba_jax import metrics
from tba_jax import parts
from tba_jax import parts_params
from tba_jax import parts_replay
from tba_jax import periods
from tba_jax import policy as policy_lib
from tba_jax import processes
from tba_jax import recorder as recorder_lib
from tba_jax import reward_judge
from tba_jax import run_directory
from tba_jax import searcher as searcher_lib
from tba_jax import trainer as trainer_lib
from tba_jax import validate
from tba_jax.replay import drain as drain_lib
from tba_jax.replay import grants as grants_lib
from tba_jax.replay import journal as journal_lib
from tba_jax.replay import outbox as outbox_lib
from tba_jax.replay import packing
from tba_jax.replay import service as service_lib

_PARTITION = 0
_FLUSH_S = 5.0


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
    joined = cluster_join.join(config.trainer, operands, run.secret, run.tls)
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


def run_searcher(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs one searcher until the trainer is done, a signal or an error.

  Args:
    config, workdir: of the run.
    operands: the searcher's index in its launcher, 0 where not given.

  Returns:
    0 where the run is at its end; 75 where the trainer was interrupted, or
    this searcher: it may be started again, also before the trainer is.
  """
  stop = processes.start_role()
  run = run_directory.open_run(workdir, config)
  events = metrics.EventLog(run.workdir / "events.jsonl")
  try:
    index = processes.index_of(operands)
    on_event = functools.partial(events.write, role="searcher", index=index)
    mesh = local_mesh.of_searcher(config.search, on_event)
    policy = policy_lib.make(config, run.workdir)
    place = local_mesh.place(mesh, config.sharding, policy)
    whole = parts_params.make_whole(config, policy, place)
    make_transport = parts_replay.transport_maker(config, run)
    judge = reward_judge.of_searcher(config, run.workdir, policy, on_event)
    agreed = parts_replay.make_agreement(
        config, run, policy, validate.check_hosts, on_event
    )
    agreed.wait(make_transport, stop.is_set)
  except ValueError as error:
    raise run_directory.NoRunError(str(error)) from error
  clock, path = metrics.BusyClock(), f"spans/searcher-{index}.jsonl"
  spans = metrics.SpanWriter(run.workdir / path, "searcher", index, clock=clock)
  puller = parts_params.make_puller(
      config, run, policy, place, whole.base, make_transport, on_event
  )
  outbox = outbox_lib.Outbox(
      make_transport,
      sid=parts_replay.make_sid(index),
      index=index,
      run_id=run.run_id,
      secret=run.secret,
      partition=_PARTITION,
      credits=config.search.credits,
      lease_s=config.search.lease_s,
      on_event=on_event,
      agree=agreed.holds,
  )
  searcher_lib.Searcher(
      task=policy.task,
      judge=judge,
      tokenizer=policy.tokenizer,
      sampler=policy_lib.make_sampler(config, policy),
      puller=puller,
      outbox=outbox,
      params_fn=parts_params.make_params_fn(policy, whole, place),
      samples_per_prompt=config.search.samples_per_prompt,
      in_flight=config.sampling.in_flight != "off",
      spans=spans,
      clock=clock,
      missing_stop_reward=reward_judge.missing_stop_reward(config),
  ).run(stop.is_set)
  # Read before `close`: a signal alone is no word of the trainer's.
  done = outbox.run_done
  judge.close()
  flushed = outbox.close(_FLUSH_S)
  puller.close()
  spans.close()
  logging.info("searcher leaves; all delivered: %s", flushed)
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

  def __enter__(self) -> trainer_lib.Trainer | device_work.Follower:
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
    transport = parts_replay.transport_maker(self._config, self._run)()
    parts_replay.make_claim(self._run).take(transport)
    transport.close()

  def _build(self) -> trainer_lib.Trainer | device_work.Follower:
    config, run = self._config, self._run
    events = metrics.EventLog(run.workdir / "events.jsonl")
    self._closers.append(events.close)
    on_event = functools.partial(events.write, role="trainer")
    policy = policy_lib.make(config, run.workdir)
    checkpointer = checkpoint_lib.Checkpointer(
        bucket.place(run.workdir / "checkpoints"),
        keep=config.checkpoint.keep,
        keep_every_steps=config.checkpoint.keep_every_steps,
        keep_every_s=config.checkpoint.keep_every_s,
        barrier=self._cluster.save_barrier(config.trainer.save_deadline_s),
        on_event=on_event,
    )
    self._closers.append(checkpointer.close)
    work, placer, saved = parts.make_work(
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
    recorder = self._make_recorder(
        policy, evaluator, drain, epoch, saved, on_event
    )
    make_transport = parts_replay.transport_maker(config, run)
    publisher = parts_params.make_publisher(
        config, run, epoch, work, make_transport, recorder, on_event
    )
    evaluations = parts.make_evaluations(
        config, policy, evaluator, run.workdir, recorder
    )
    self._closers += [publisher.close, evaluations.close]
    data_report.write(policy.task, run.workdir, on_event)
    drain.start()
    return trainer_lib.Trainer(
        work=work,
        service=service,
        batch_maker=parts.make_batch_maker(config, service.buffer, placer),
        publisher=publisher,
        checkpointer=checkpointer,
        journal=journal,
        evaluations=evaluations,
        guards=guards_lib.Guards(config.guards, saved.get("guards")),
        recorder=recorder,
        periods=periods.make(config, policy.task),
        applied_history=[tuple(p) for p in saved.get("applied_history", ())],
        stopped_by=parts.stopped_by(config, saved),
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
      drain: drain_lib.Drain,
      epoch: int,
      saved: dict[str, Any],
      on_event: Callable[[str, str], None],
  ) -> recorder_lib.Recorder:
    config = self._config
    recorder = recorder_lib.Recorder(
        self._run.workdir,
        metrics=parts.make_writers(config, self._run, epoch, on_event),
        num_steps=config.train.num_steps,
        num_searchers=config.search.num_searchers,
        log_every=config.log.every_steps,
        samples_every=config.log.samples_every_steps,
        samples=parts.make_sample_log(
            config, policy, self._run.workdir, evaluator.judge
        ),
        leases=drain.heard,
        store_generation=lambda: drain.generation,
        set_status=drain.set_status,
    )
    self._closers.append(recorder.close)
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
  ) -> tuple[drain_lib.Drain, service_lib.ReplayService]:
    config, run = self._config, self._run
    buffer = parts_replay.make_buffer(config, policy)
    order = parts_replay.make_prompt_order(config, policy)
    ledger = ledger_lib.Ledger()
    applied, watermarks = journal.start, {}
    if saved is not None:
      buffer.set_state(saved["buffer"])
      order.set_state(saved["order"])
      ledger.set_state(saved["ledger"])
      applied, watermarks = saved["applied"], saved["watermarks"]
    flow = parts_replay.make_flow(config)
    drain = drain_lib.Drain(
        parts_replay.transport_maker(config, run),
        journal=journal,
        grants=grants_lib.Grants(
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
        partition=_PARTITION,
        claim=parts_replay.make_announcement(config, run, policy),
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
            packing.check_group,
            vocab_size=policy.model.config.vocab_size,
            max_prompt_tokens=config.sampling.max_prompt_tokens,
        ),
        on_event=on_event,
        score_groups=scorer.score,
    )
    return drain, service
