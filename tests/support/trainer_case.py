# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A trainer with mocked parts that log its calls."""

import contextlib
from unittest import mock

from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from tba_jax import hooks
from tba_jax.evaluation import evaluations
from tba_jax.evaluation import evaluator
from tba_jax.learning import checkpoint
from tba_jax.learning import device_work
from tba_jax.learning import guards
from tba_jax.learning import learner
from tba_jax.learning import train_step as train_step_lib
from tba_jax.mesh import cluster
from tba_jax.policy import lora
from tba_jax.policy import reference_policy
from tba_jax.replay import decisions
from tba_jax.run import recorder
from tba_jax.transport.groups import service
from tba_jax.transport.params import publish
from tests.support import base_config
from tests.transport.groups import fake_groups

METRICS = {
    "loss": 1.0,
    "grad_norm": 1.0,
    "nonfinite": 0.0,
    "entropy": 1.0,
    "kl": 1.0,
    "logprob_gap": 0.0,
    "on_policy_share": 1.0,
}


class TrainerCase(parameterized.TestCase):
  """Base of the trainer's tests."""

  def setUp(self):
    super().setUp()
    self.log = []
    self.metrics = {}  # step -> values that differ from METRICS
    self.accuracy = {}  # step -> pass@1
    self.stop_at = None  # first step with a true `should_stop`
    self.ready = True
    self.results = {}
    self.saved = {}
    self.decided = []
    self.step = 0
    self.make_parts()

  def make_parts(self):
    note = lambda name: lambda *args, **kwargs: self.log.append((name, args[0]))
    autospec = lambda cls: mock.create_autospec(cls, instance=True)
    self.sink = autospec(publish.Publisher)
    self.sink.submit.side_effect = self.publish
    self.source = autospec(service.ReplayService)
    self.source.buffer = fake_groups.make_buffer()
    for i in range(4):
      group = fake_groups.make_group(i, [[2, 0], [3, 0]], version=i)
      self.source.buffer.insert(group, 0)
    self.source.draw.side_effect = self.source.buffer.sample
    self.source.applied = 0
    self.source.open.side_effect = note("open")
    self.source.begin_step.side_effect = self.begin_step
    self.source.is_ready.side_effect = lambda step: self.ready
    self.source.get_state.side_effect = lambda: {"applied": 100 * self.step}
    self.source.finish.side_effect = lambda step, deadline_s: (
        self.log.append(("finish", step)) or {"closed": True}
    )
    self.source.stop_searchers.side_effect = note("stop_searchers")
    self.learner = autospec(learner.Learner)
    self.learner.make.side_effect = lambda draw: self.log.append(
        ("draw", draw.step)
    )
    self.learner.step.side_effect = lambda draw: self.work.train(
        self.learner.make(draw)
    )
    self.learner.read.side_effect = lambda metrics: {
        name: float(value) for name, value in metrics.items()
    }
    self.checkpointer = autospec(checkpoint.Checkpointer)
    self.checkpointer.latest_step.return_value = None
    self.checkpointer.save.side_effect = self.save
    # The newest save may still be in progress.
    self.checkpointer.newest_steps.side_effect = lambda: sorted(self.saved)[
        -3:-1
    ]
    self.evaluator = autospec(evaluator.Evaluator)
    self.best = autospec(evaluations.BestModel)
    self.evaluator.num_prompts = 100
    self.evaluator.while_training.return_value = self.evaluator
    self.evaluator.run.side_effect = self.evaluate
    self.decisions = autospec(decisions.DecisionLog)
    self.decisions.step.side_effect = lambda step, decision, *_: (
        self.decided.append((step, decision))
    )
    self.evaluator.run_all.side_effect = self.evaluator.run
    self.recorder = autospec(recorder.Recorder)
    self.recorder.span.side_effect = lambda *a, **k: contextlib.nullcontext()
    self.recorder.get_state.return_value = {}
    self.recorder.has_result.side_effect = lambda name, step=None: (
        name in self.results and step in (None, self.results[name])
    )
    self.recorder.has_evaluation.return_value = True
    self.recorder.step.side_effect = note("read")
    self.recorder.evaluation.side_effect = self.record_evaluation

  def publish(self, step, params, nonfinite=0):
    if not nonfinite:
      self.log.append(("publish", step, int(params["made_by"])))

  def begin_step(self, step, should_stop):
    if should_stop():
      return False
    self.log.append(("begin", step))
    self.source.applied = 100 * (step + 1)
    return True

  def save(self, step, state, host_state, *, wait):
    self.log.append(("save", step))
    self.saved[step] = (state, host_state, wait)

  def evaluate(
      self, params, num_prompts, *, version, should_stop, on_progress=None
  ):
    if should_stop():
      raise evaluator.Interrupted
    # The copy of this step, even if training has continued.
    assert int(params["made_by"]) == version
    self.log.append(("evaluate", version, num_prompts))
    accuracy = self.accuracy.get(version, 0.5)
    return {"pass_at_1": accuracy, "split": "held_out"}

  def record_evaluation(self, name, step, result):
    if name:
      self.results[name] = step

  def train_step(self, state, batch):
    step = int(state.step)
    self.log.append(("step", step))
    self.scales.append(float(state.learning_rate_scale))
    state = train_step_lib.TrainState(
        **{
            **vars(state),
            "step": state.step + 1,
            "params": {"made_by": jnp.asarray(step + 1)},
        }
    )
    self.step = step + 1
    metrics = {**METRICS, **self.metrics.get(step, {})}
    return state, {k: np.float32(v) for k, v in metrics.items()}

  def make(self, *, action="warn", step=0, saved=None, changed=(), **changes):
    """Returns a trainer at a step.

    `changes` are `section__key` settings; `changed` lists keys that differ from
    the checkpoint's.
    """
    config = base_config.make(
        **{
            "train__num_steps": 6,
            "train__prompts_per_batch": 3,
            "train__completions_per_prompt": 2,
            "publish__every_steps": 1,
            "checkpoint__every_steps": 0,
            "evaluate__every_steps": 0,
            "evaluate__num_prompts": 16,
            "evaluate__final_prompts": 64,
            "evaluate__background": False,
            "guards__action": action,
            **changes,
        }
    )
    self.scales = []
    self.step = step
    state = train_step_lib.TrainState(
        step=jnp.asarray(step),
        params={"made_by": jnp.asarray(step)},
        opt_state=(),
        loss_params={},
        loss_opt_state=(),
        proximal_params={},
        ref_params={},
        sampling_params={"made_by": jnp.asarray(-1)},
        learning_rate_scale=jnp.asarray(1.0),
    )
    self.work = device_work.DeviceWork(
        config,
        state=state,
        train_step=self.train_step,
        reference=reference_policy.Reference(
            None, None, temperature=1.0, every_steps=1
        ),
        merger=lora.ParamsMerger("", lambda params: params),
        checkpointer=self.checkpointer,
        cluster=cluster.Cluster(),
    )
    self.evaluations = evaluations.Evaluations(
        config, self.evaluator, self.recorder, self.best
    )
    self.addCleanup(self.evaluations.close)

    self.learner.work = self.work
    parts = hooks.TrainerParts(
        learner=self.learner,
        source=self.source,
        sink=self.sink,
        checkpointer=self.checkpointer,
        evaluations=self.evaluations,
        initial_params=lambda: {"made_by": jnp.asarray(0)},
        guards=guards.Guards(config, backend="cpu"),
        recorder=self.recorder,
        decisions=self.decisions,
    )
    return hooks.TrainerRun(config, parts, saved or {}, dict.fromkeys(changed))

  def should_stop(self):
    return self.stop_at is not None and self.step >= self.stop_at

  def run_it(self, **changes):
    return self.make(**changes)(self.should_stop)

  def logged(self, *names):
    return [entry for entry in self.log if entry[0] in names]

  def steps(self, name):
    return [entry[1] for entry in self.logged(name)]
