# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Wires the roles: the programs `trainer` and `searcher` over a channel."""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import math
import signal
import socket
import sys
from typing import Any

from absl import logging
import jax
import ml_collections
import numpy as np

from tba_jax import collect
from tba_jax import hooks
from tba_jax import schedule as schedule_lib
from tba_jax import searcher as searcher_lib
from tba_jax import types
from tba_jax.config import differences
from tba_jax.config import settings
from tba_jax.environments import build as environments_build
from tba_jax.evaluation import evaluations as evaluations_lib
from tba_jax.evaluation import reward_judge
from tba_jax.learning import agreement
from tba_jax.learning import buffers
from tba_jax.learning import checkpoint
from tba_jax.learning import device_work
from tba_jax.learning import group_reference
from tba_jax.learning import guards as guards_lib
from tba_jax.learning import learner as learner_lib
from tba_jax.learning import published
from tba_jax.learning import work_parts
from tba_jax.losses import objective_table
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import policy_samplers
from tba_jax.policy import reference_policy
from tba_jax.programs import replica
from tba_jax.programs import titled_rows
from tba_jax.replay import curriculum
from tba_jax.replay import decisions
from tba_jax.replay import prompt_order
from tba_jax.run import metrics
from tba_jax.run import recorder as recorder_lib
from tba_jax.run import run_directory
from tba_jax.sampling import offline_sampler
from tba_jax.sampling import samplers
from tba_jax.system import bucket
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.tasks import rows
from tba_jax.transport import byte_store
from tba_jax.transport import ports
from tba_jax.transport.groups import memory
from tba_jax.transport.groups import queue_client
from tba_jax.transport.groups import queue_server
from tba_jax.transport.groups import service as service_lib
from tba_jax.transport.kv import kv_client
from tba_jax.transport.params import carrier
from tba_jax.transport.params import probe
from tba_jax.transport.params import publish
from tba_jax.transport.params import pull
from tba_jax.transport.params import version

# Seconds that a leaving searcher gets to send its finished groups.
_FLUSH_S = 5.0
# Share of a device's memory that can be used, because it fragments.
_SAFE_SHARE = 0.95


# --- Trainer -----------------------------------------------------------------


def run_trainer(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs one trainer process until the last step, a signal or an error.

  `operands` give the process's place in its cluster (`cluster.join`), if any.
  """
  should_stop = processes.start_role("trainer").is_set
  run = run_directory.open_run(workdir, config)
  return train(config, run, operands, should_stop)


def train(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    operands: Sequence[str],
    should_stop: Callable[[], bool],
    channel: "Channel | None" = None,
) -> int:
  """Trains in the main thread of a set-up process; see `run_trainer`.

  Args:
    operands: place of the process in its cluster.
    channel: memory shared with the searchers; None for the store.

  Returns:
    Exit status; 75 if `should_stop` ended the process after saving.
  """
  channel = channel or StoreChannel(config, run)
  try:
    joined = cluster_lib.join(config.trainer, operands, run.secret, run.tls)
    with joined as cluster, _open(config, run, cluster, channel) as run_role:
      done = run_role(cluster.stopper(should_stop))
      status = processes.EXIT_OK if done else processes.EXIT_INTERRUPTED
      cluster.end(status)
  except run_directory.NoRunError:
    raise
  except (FloatingPointError, ValueError) as error:
    # A restart would fail at the same point, so do not ask for one.
    logging.exception("the trainer cannot continue")
    print(f"error: {error}", file=sys.stderr)
    return cluster_lib.status_of(error)
  except cluster_lib.Ended as end:
    return end.status
  return status


@contextlib.contextmanager
def _open(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    cluster: cluster_lib.Cluster,
    channel: "Channel",
) -> Iterator[Callable[[Callable[[], bool]], bool]]:
  """Yields the trainer on process 0 and a replica on the others."""
  closing, error = contextlib.ExitStack(), None
  try:
    agreement.check_processes(cluster, config, run)
    if cluster.leads:
      _take_run(config, run, closing, channel)
    cluster.begin()
    if cluster.leads:
      yield make_trainer(config, run, cluster, closing, channel)
    else:
      yield make_replica(config, run, cluster, closing)
  except BaseException as raised:
    error = raised
    raise
  finally:
    if not cluster.leaves_alone(error):
      # Announce the end first: closing is collective.
      cluster.end(cluster_lib.status_of(error))
      _close(closing, error)


def _close(closing: contextlib.ExitStack, error: BaseException | None) -> None:
  """Closes a trainer; a failure to close does not hide the original error."""
  try:
    closing.close()
  except Exception:
    if error is None or isinstance(error, cluster_lib.Ended):
      raise
    logging.exception("could not close after %r", error)


def _take_run(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    closing: contextlib.ExitStack,
    channel: "Channel",
) -> None:
  """Locks the run directory and the channel before anything is written.

  Raises:
    NoRunError: another trainer holds a lock, or a file or setting does not fit.
  """
  if run.memory is not None:
    return  # A run in memory has no other user.
  try:
    lock = run_directory.lock(str(run.workdir), "trainer")
    closing.callback(bucket.hold(lock, run.workdir).close)
    changes = differences.check_resume(
        run_directory.load_config(str(run.workdir)), config
    )
    run_directory.check_written(run)
    _check_epoch(run)
    channel.claim()
    # A trainer on a cluster may have a separate directory.
    if any(settings.hosts(key) != "own" for key in changes):
      run_directory.update(str(run.workdir), config)
  except ValueError as error:
    raise run_directory.NoRunError(str(error)) from error


def _check_epoch(run: run_directory.RunInfo) -> None:
  """Raises ValueError if the run's epoch counter was lost."""
  epoch = run.workdir / "epoch.json"
  if (run.workdir / "metrics.jsonl").exists() and not epoch.exists():
    raise ValueError(
        f"{epoch} is missing, though the run has metrics: restore it as"
        ' {"epoch": N}, N above every "epoch" in metrics.jsonl'
    )


def check_is_new(
    config: ml_collections.ConfigDict, run: run_directory.RunInfo
) -> None:
  """Raises NoRunError if the run should have a checkpoint by now."""
  records = jsonl.read_jsonl(run.workdir / "metrics.jsonl")
  last = max((int(r.get("step", 0)) for r in records), default=0)
  every = config.checkpoint.every_steps
  # The second periodic save only starts after the first is complete.
  if every and last >= 2 * every:
    raise run_directory.NoRunError(
        f"{run.workdir / 'checkpoints'}: no checkpoint found, though"
        f" metrics.jsonl goes to step {last}; restore it or use a new"
        " directory"
    )


def lock_store(
    transport: byte_store.Transport, run: run_directory.RunInfo
) -> None:
  """Takes the store's run lock in the name of the run directory."""
  queue_server.lock_store(
      transport,
      run,
      owner=run_directory.owner(run),
      place=f"{socket.gethostname()}:{run.workdir}",
  )


def make_trainer(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    cluster: cluster_lib.Cluster,
    closing: contextlib.ExitStack,
    channel: "Channel",
) -> hooks.TrainerRun:
  """Returns a trainer restored from the newest checkpoint, or at step 0.

  Args:
    closing: stack on which the parts register their `close`.
    channel: memory shared with the searchers.

  Raises:
    ValueError: a setting or a file does not fit.
  """
  events = metrics.EventLog(run.files.lines("events.jsonl"), role="trainer")
  closing.callback(events.close)
  policy = policy_lib.make_policy(config, run.workdir)
  checkpointer = None
  if run.memory is None:
    checkpointer = _make_checkpointer(config, run, cluster, events)
    closing.callback(checkpointer.close)
  if math.prod(config.mesh.values()) > 1:
    mesh = sharding.make_mesh(config.mesh)
    shards = titled_rows.sharding_rows(
        sharding.abstract_params(policy.model, mesh)
    )
    lines = "\n".join(f"  {name}: {value}" for name, value in shards)
    logging.info("mesh %s:\n%s", dict(config.mesh), lines)
  work, saved = work_parts.make_work(config, run, policy, cluster, checkpointer)
  closing.callback(work.close)
  if run.memory is not None:
    run.memory.save_model = lambda folder: hf.save(
        folder, policy.model.config, work.gather_model(), policy.tokenizer
    )
  changes = {}
  if saved:
    step = int(work.state.step)
    changes = differences.changed(saved["config"], config)
    events.write("restored", f"checkpoint of step {step}", step=step)
    if changes:
      message = f"from step {step} on: {'; '.join(differences.lines(changes))}"
      events.write("settings_changed", message, step=step, changes=changes)
  else:
    check_is_new(config, run)
  epoch = 1 if run.memory else run_directory.next_epoch(run)
  logging.info("trainer epoch %d on %s", epoch, jax.devices())
  order_folder = None if run.memory else run.workdir / "replay"
  receiver = channel.make_receiver(
      order=curriculum.make_order(
          config, policy.task, policy.tokenizer, order_folder
      ),
      epoch=epoch,
      policy=policy,
      on_event=events.write,
      first_version=int(work.state.step),
      saved=saved.get("data"),
  )
  closing.callback(receiver.close)
  mesh = sharding.own_mesh(sharding.make_mesh(config.mesh))
  source = service_lib.ReplayService(
      config,
      receiver=receiver,
      buffer=buffers.make_buffer(config, policy, mesh),
      vocab_size=policy.model.config.vocab_size,
      num_experts=policy.model.config.num_experts,
      on_event=events.write,
      saved=saved.get("data"),
  )
  log = None
  if run.memory is None:
    log = decisions.DecisionLog(run.workdir, events.write)
    closing.callback(log.close)
    log.start(
        decisions.Start(
            epoch=epoch,
            step=int(work.state.step),
            applied=source.applied,
            config=config.to_dict(),
            machine=device_work.machine(),
        )
    )
  reference = None
  if config.evaluate.certificate:
    # Unlike the work's, it takes batches of any size.
    reference = reference_policy.Reference(
        work.reference.model,
        work.reference.params,
        temperature=config.sampling.temperature,
    )
  evaluator = reward_judge.make_evaluator(
      config,
      run.workdir,
      policy,
      events.write,
      mesh=mesh,
      reference=reference,
  )
  closing.callback(evaluator.close)
  recorder = recorder_lib.Recorder(
      config,
      run,
      epoch=epoch,
      queue=receiver,
      tokenizer=policy.tokenizer,
      judge=evaluator.judge,
  )
  # A program has the main thread to itself.
  if run.memory is None:
    signal.signal(signal.SIGUSR1, lambda *_: recorder.capture_profile())
  closing.callback(recorder.close)
  if saved:
    recorder.set_state(saved["recorder"])
  sink = channel.make_params_sink(epoch=epoch, work=work, recorder=recorder)
  closing.callback(sink.close)
  best = None
  if config.checkpoint.keep_best and run.memory is None:
    best = evaluations_lib.BestModel(run.workdir, policy)
  evaluations = evaluations_lib.Evaluations(config, evaluator, recorder, best)
  closing.callback(evaluations.close)
  rows.write_report(policy.task, run.files.write, events.write)
  receiver.start()
  parts = hooks.TrainerParts(
      learner=learner_lib.make_learner(
          config, policy, source.buffer, work, span=recorder.span
      ),
      source=source,
      sink=sink,
      checkpointer=checkpointer,
      evaluations=evaluations,
      initial_params=lambda: policy_lib.initial_params(policy, config.seed),
      guards=guards_lib.Guards(
          config,
          saved.get("guards"),
          backend=jax.default_backend(),
          num_sampled_by_chance=(
              math.inf
              if config.search.order == "shuffled"
              else receiver.order.num_prompts
          ),
          unchecked_step=int(work.state.step) if changes else -1,
      ),
      recorder=recorder,
      decisions=log,
  )
  return hooks.TrainerRun(config, parts, saved, changes)


def make_replica(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    cluster: cluster_lib.Cluster,
    closing: contextlib.ExitStack,
) -> replica.Replica:
  """Returns the part that the trainer's other processes run."""
  events = metrics.EventLog(run.files.lines("events.jsonl"), role="trainer")
  closing.callback(events.close)
  checkpointer = _make_checkpointer(config, run, cluster, events)
  closing.callback(checkpointer.close)
  policy = policy_lib.make_policy(config, run.workdir)
  work, _ = work_parts.make_work(config, run, policy, cluster, checkpointer)
  closing.callback(work.close)
  return replica.Replica(cluster, work)


def _make_checkpointer(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    cluster: cluster_lib.Cluster,
    events: metrics.EventLog,
) -> checkpoint.Checkpointer:
  return checkpoint.Checkpointer(
      bucket.place(run.workdir / "checkpoints"),
      keep=config.checkpoint.keep,
      keep_every_steps=config.checkpoint.keep_every_steps,
      keep_every_s=config.checkpoint.keep_every_s,
      barrier=cluster.save_barrier(config.trainer.save_deadline_s),
      on_event=events.write,
  )


# --- Searcher ----------------------------------------------------------------


def run_searcher(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs one searcher until the trainer is done, a signal or an error.

  Args:
    operands: the searcher's index in its launcher, 0 by default.

  Returns:
    0 at the end of the run; 75 if this searcher or the trainer was interrupted,
    and the searcher should be started again.
  """
  should_stop = processes.start_role("searcher").is_set
  try:
    index = processes.index_of(operands)
  except ValueError as error:
    raise run_directory.NoRunError(str(error)) from error
  run = run_directory.open_run(workdir, config)
  done = search(config, run, index, should_stop)
  return processes.EXIT_OK if done else processes.EXIT_INTERRUPTED


def search(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    index: int,
    should_stop: Callable[[], bool],
    channel: "Channel | None" = None,
) -> bool:
  """Samples in a set-up process; returns whether the run is complete.

  Args:
    index: number of this searcher in its launcher, from 0.
    channel: memory shared with the trainer; None for the store.

  Raises:
    NoRunError: a setting or file does not fit, or differs from the trainer's,
      or a newer searcher has taken this one's place.
  """
  with contextlib.ExitStack() as closing:
    try:
      channel = channel or StoreChannel(config, run)
      searcher = make_searcher(
          config, run, index, should_stop, closing, channel
      )
    except ValueError as error:
      raise run_directory.NoRunError(str(error)) from error
    try:
      return searcher.run()
    except queue_client.ReplacedError as error:
      raise run_directory.NoRunError(str(error)) from error


def make_searcher(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    index: int,
    should_stop: Callable[[], bool],
    closing: contextlib.ExitStack,
    channel: "Channel",
) -> searcher_lib.Searcher:
  """Returns a searcher after checking that the trainer has the same settings.

  Args:
    index: number of this searcher in its launcher, from 0.
    closing: stack on which the parts register their `close`, which sends
      remaining groups.

  Raises:
    ValueError: a setting or file does not fit, or differs from the trainer's.
  """
  events = metrics.EventLog(
      run.files.lines("events.jsonl"), role="searcher", index=index
  )
  closing.callback(events.close)
  mesh = sharding.searcher_mesh(config.search, events.write)
  policy = policy_lib.make_policy(config, run.workdir)
  place = sharding.make_place(mesh, policy)
  load_start = make_load_start(config, policy, place)
  to_adapter = None
  if samplers.SAMPLERS[config.search.sampler].takes_adapters:
    to_adapter = lora.make_adapter_fn(config.lora, policy.model, policy.folder)
  if to_adapter is None:
    merger = lora.make_merger(
        policy.adapters, policy.folder, config.seed, load_start
    )
    params_fn = make_params_fn(policy, merger, place)
  else:
    merger = lora.ParamsMerger(
        lora.base_name(policy.folder, config.seed), to_adapter
    )
    params_fn = make_params_fn(policy, merger, None)
  reference = None
  if objective_table.holds_reference(config, "searcher"):
    reference = group_reference.make_group_reference(
        config, policy, load_start, mesh
    )
  judge = reward_judge.make_judge(
      config, run.workdir, policy.task, events.write, mesh=mesh
  )
  closing.callback(judge.close)
  log = offline_sampler.make(config, policy.task, policy.tokenizer)
  own_environments = None
  if log is None or log.share < 1:  # A log's episodes have been played.
    own_environments = environments_build.make(
        config, run.workdir, policy.task, policy.tokenizer, events.write
    )
  if own_environments is not None:
    closing.callback(own_environments.close)
  spans = metrics.SpanWriter(
      run.files.text(f"spans/searcher-{index}.jsonl"),
      "searcher",
      index,
      clock=metrics.BusyClock(),
  )
  closing.callback(spans.close)
  home = samplers.SamplerHome(run.workdir, index, events.write, spans.progress)
  sampler = policy_samplers.make_searcher_sampler(config, policy, home)
  if log is not None:
    for line in log.report():
      events.write("logged", f"{config.offline.path}: {line}")
    sampler = offline_sampler.OfflineSampler(log, sampler)

  def warm_up(params: types.PyTree) -> None:
    sampler.warm_up(params)
    if reference is not None:
      reference.warm_up()

  put = lambda leaves: sampler.put(params_fn(leaves), place.model)
  of_store = isinstance(channel, StoreChannel)
  if reference is not None and of_store and policy.adapters is None:
    # Compile while the trainer starts. Versions also arrive as host arrays.
    with spans.span("compile"):
      start = put(published.flatten(load_start()))
      warm_up(start)
      if work_parts.has_probe(config, run):
        tokens_BxL = probe.draw_tokens(config, policy.model.config.vocab_size)
        jax.block_until_ready(sampler.token_logprobs(start, tokens_BxL))
      del start
  with spans.span("wait_params"):
    channel.wait_for_trainer(policy, events, should_stop)
  like = jax.eval_shape(policy.trained.init, jax.random.PRNGKey(0))
  source = channel.make_params_source(
      like={**like, probe.LEAF: probe.abstract(config)},
      events=events,
      base_name=merger.base,
  )
  closing.callback(source.close)
  sink = channel.make_group_sink(index=index, on_event=events.write)
  closing.callback(_leave, sink)

  problem = lambda leaves, params: ""
  compute_dtype = config_lib.compute_dtype(config.model, sampler.platform)
  if work_parts.has_probe(config, run):
    limit = probe.max_gap(config, sampler.platform, compute_dtype)
    problem = probe.Check(sampler.token_logprobs, limit).problem
  schedule = schedule_lib.make_schedule(config)
  is_spread = math.prod(config.search.mesh.values()) > 1
  parts = searcher_lib.SearcherParts(
      sink=sink,
      source=source,
      collector=collect.make_collector(
          config,
          policy,
          sampler,
          judge,
          reference=reference,
          environments=own_environments,
          prompt_tokens=log and log.prompt_tokens,
      ),
      put=put,
      problem=problem,
      on_event=events.write,
      warm_up=warm_up,
      # Merging and rounding run their own programs in their own order.
      has_room=(
          has_room
          if policy.adapters is None and not config.search.quantization
          else lambda params: False
      ),
      judge_totals=judge.totals,
      kind=samplers.kind(config, compute_dtype),
      price_per_hour=config.search.price_per_hour,
      spans=spans,
      swaps_in_flight=config.sampling.in_flight != "off",
      judge_shares_mesh=judge.on_devices and is_spread,
      reference_first=is_spread,
      lag_steps=schedule.lag_steps,
      takes_newer=schedule.takes_newer,
  )
  searcher = searcher_lib.Searcher(parts, should_stop)
  closing.callback(searcher.close)
  return searcher


def _leave(sink: ports.GroupSink) -> None:
  flushed = sink.close(_FLUSH_S)
  logging.info("searcher leaves; all delivered: %s", flushed)


def make_load_start(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    place: sharding.Placement = sharding.ONE_DEVICE,
) -> Callable[[], types.PyTree]:
  """Returns a function that loads the run's initial params once.

  They serve as the adapters' base and the reference, on the sampler's devices;
  without adapters, they are in the compute dtypes. The function raises
  ValueError if they cannot be read.
  """

  def load_start() -> types.PyTree:
    params = policy_lib.initial_params(policy, config.seed, place.model)
    if policy.adapters is None:
      params = published.computed(config, params)
    return place.put(params)

  return functools.cache(load_start)


def make_params_fn(
    policy: policy_lib.Policy,
    merger: lora.ParamsMerger,
    place: sharding.Placement | None = sharding.ONE_DEVICE,
) -> Callable[[dict[str, np.ndarray]], types.PyTree]:
  """Returns a function from published leaves by path to the model's params.

  Without adapters, leaves stay on the host; adapters are merged on the devices,
  or on the host if `place` is None.
  """
  like = jax.eval_shape(policy.trained.init, jax.random.PRNGKey(0))

  def params_fn(leaves: dict[str, np.ndarray]) -> types.PyTree:
    trained = published.unflatten(leaves, like)
    if policy.adapters is None:
      return trained
    if place is None:
      return merger.params(trained)
    return place.put(merger.params(jax.device_put(trained, place.trained)))

  return params_fn


def has_room(params: types.PyTree) -> bool:
  """Returns whether the devices of params have room for another copy of them.

  Judges by the devices' peak use so far; False if they do not report it, as on
  CPUs, where pulled params are already in the devices' memory.
  """
  needed: collections.Counter[jax.Device] = collections.Counter()
  for leaf in jax.tree.leaves(params):
    if not isinstance(leaf, jax.Array):
      return False
    for shard in leaf.addressable_shards:
      needed[shard.device] += shard.data.nbytes
  for device, num_bytes in needed.items():
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
      return False
    free = _SAFE_SHARE * stats["bytes_limit"] - stats["peak_bytes_in_use"]
    if num_bytes > free:
      return False
  return bool(needed)


# --- Channel -----------------------------------------------------------------


class StoreChannel:
  """One role's access to the store between the trainer and its searchers."""

  def __init__(
      self, config: ml_collections.ConfigDict, run: run_directory.RunInfo
  ):
    self._config = config
    self._run = run
    self._connect = functools.partial(
        kv_client.connect, run, config.store.deadline_s
    )
    self._agreement: agreement.Agreement | None = None

  def claim(self) -> None:
    """Locks out other trainers; raises ValueError if one is running."""
    with contextlib.closing(self._connect()) as transport:
      lock_store(transport, self._run)

  def make_receiver(
      self,
      *,
      order: prompt_order.PromptOrder,
      epoch: int,
      policy: policy_lib.Policy,
      on_event: Callable[[str, str], None],
      first_version: int,
      saved: dict[str, Any] | None,
  ) -> queue_server.QueueServer:
    """Returns the trainer-side queue; see `QueueServer`."""
    config, run = self._config, self._run
    settings = agreement.describe(config, run, policy)

    def open_store(transport: byte_store.Transport) -> None:
      lock_store(transport, run)
      agreement.put(transport, settings, run, epoch)

    return queue_server.QueueServer(
        config,
        run,
        make_transport=self._connect,
        order=order,
        epoch=epoch,
        open_store=open_store,
        on_event=on_event,
        first_version=first_version,
        saved=saved,
    )

  def make_params_sink(
      self,
      *,
      epoch: int,
      work: device_work.DeviceWork,
      recorder: recorder_lib.Recorder,
  ) -> publish.Publisher:
    """Returns the trainer's publisher."""
    config, run = self._config, self._run
    copy = published.make_copy(config)
    specs = version.specs_of(jax.eval_shape(copy, work.state.params))
    return publish.Publisher(
        config,
        run,
        make_transport=self._connect,
        carriers=carrier.make_write_carriers(config, run, specs, work.peers),
        copy=copy,
        epoch=epoch,
        lag_steps=schedule_lib.make_schedule(config).lag_steps,
        base_name=work.base,
        on_event=recorder.event,
        span=recorder.span,
    )

  def wait_for_trainer(
      self,
      policy: policy_lib.Policy,
      events: metrics.EventLog,
      should_stop: Callable[[], bool],
  ) -> None:
    """Waits for the trainer's settings; raises ValueError if they differ."""
    settings = agreement.describe(self._config, self._run, policy)
    self._agreement = agreement.Agreement(settings, self._run, events)
    self._agreement.wait(self._connect, should_stop)

  def make_params_source(
      self, *, like: types.PyTree, events: metrics.EventLog, base_name: str
  ) -> pull.Puller:
    """Returns a searcher's puller."""
    config, run = self._config, self._run
    return pull.Puller(
        config,
        run,
        version.specs_of(published.by_path(like)),
        make_transport=self._connect,
        carriers=carrier.make_read_carriers(config, run),
        lag_steps=schedule_lib.make_schedule(config).lag_steps,
        on_event=events.write,
        base_name=base_name,
    )

  def make_group_sink(
      self, *, index: int, on_event: Callable[[str, str], None]
  ) -> queue_client.QueueClient:
    """Returns the searcher-side queue; call `wait_for_trainer` first."""
    return queue_client.QueueClient(
        self._config,
        self._run,
        make_transport=self._connect,
        sid=ports.make_sid(index),
        index=index,
        on_event=on_event,
        check_trainer=self._agreement.holds,
        first_epoch=self._agreement.epoch,
    )


# Maker of a role's ports, each at most once.
Channel = StoreChannel | memory.MemoryChannel
