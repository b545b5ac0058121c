# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters: the product, what is trained, the check of the base."""

import functools
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.learning import checkpoint
from tba_jax.learning import model_source
from tba_jax.learning import published
from tba_jax.learning import train_step
from tba_jax.learning import work_parts
from tba_jax.losses import objective
from tba_jax.mesh import cluster
from tba_jax.mesh import sharding
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_names
from tba_jax.policy import checks
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import reference_policy
from tba_jax.policy import settings as policy_settings
from tba_jax.programs import roles
from tba_jax.run import run_directory
from tba_jax.tools import export
from tests.support import base_config
from tests.support import tiny_model

arithmetic = variants.import_config("configs/arithmetic.py")

_FAMILIES = (
    dict(family="llama"),
    dict(family="gemma3_text", sliding_window=3, global_layers=(False, True)),
    dict(family="mistral", sliding_window=3),
    dict(family="qwen2"),
    dict(family="qwen3"),
    dict(family="qwen3_moe", num_experts=4, experts_per_token=2),
    dict(family="gpt_oss", num_experts=4, experts_per_token=2),
    dict(family="ministral3", query_growth=0.5, rope_original_positions=3),
    dict(family="olmo3", sliding_window=3, global_layers=(False, True)),
    dict(family="smollm3", rotary_layers=(True, False)),
    dict(
        family="gpt_neox",
        num_kv_heads=4,
        parallel_residual=True,
        activation="gelu",
        attention_bias=True,
    ),
    tiny_model.STATES,
    tiny_model.SPARSE,
    tiny_model.SHARED,
    tiny_model.BOTH,
    tiny_model.LATENTS,
    tiny_model.LATENTS | dict(query_rank=0),
    dict(family="gpt2", num_kv_heads=4, activation="gelu_new"),
)


def settings(rank=2, alpha=6.0, targets="all"):
  return dict(rank=rank, alpha=alpha, targets=targets)


@functools.cache
def make(**changes):
  """Returns (model, base, adapters' functions, adapters off their start)."""
  model = tiny_model.make_model(**changes)
  functions = lora.make(settings(), model)
  moved = jax.tree.map(
      lambda x: 0.1
      * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape),
      jax.eval_shape(functions.init, jax.random.PRNGKey(0)),
  )
  return model, tiny_model.init_params(model), functions, moved


class AdaptersTest(parameterized.TestCase):

  def test_makes_none_with_rank_0(self):
    self.assertIsNone(lora.make(settings(rank=0), tiny_model.make_model()))

  @parameterized.parameters(*_FAMILIES)
  @pytest.mark.slow
  def test_is_the_product_written_out(self, **family):
    model, base, functions, moved = make(**family)
    found = jax.device_get(functions.merge(base, moved))
    expected = jax.tree.map(np.array, base)
    block = expected["blocks"]
    for part, adapted in moved["blocks"].items():
      for name, factors in adapted.items():
        a, b = (np.asarray(factors[k], np.float64) for k in "ab")
        kernel = block[part][name]
        of_experts = not isinstance(kernel, dict)
        kernel = kernel if of_experts else kernel["kernel"]
        # Layers, and in a layer of experts those.
        lead = kernel.shape[: 1 + of_experts]
        rank = a.shape[len(lead)]
        product = b.reshape(*lead, -1, rank) @ a.reshape(*lead, rank, -1)
        kernel += (6.0 / 2 * product).reshape(kernel.shape)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    # The base is unchanged.
    chex.assert_trees_all_equal(base, tiny_model.init_params(model))

  def test_starts_as_its_base(self):
    _, base, functions, _ = make()
    start = functions.init(jax.random.PRNGKey(1))
    chex.assert_trees_all_equal(functions.merge(base, start), base)
    a = start["blocks"]["mlp"]["down"]["a"]
    np.testing.assert_allclose(a.std(), 1 / np.sqrt(32), rtol=0.2)

  def test_adapts_the_targets_alone(self):
    model = tiny_model.make_model()
    functions = lora.make(settings(targets="q, down"), model)
    down = {
        "a": ("layers", "lora_rank", "mlp"),
        "b": ("layers", "width", "lora_rank"),
    }
    q = {
        "a": ("layers", "lora_rank", "width"),
        "b": ("layers", "heads", "head_dim", "lora_rank"),
    }
    self.assertEqual(
        functions.logical_axes,
        {"blocks": {"attention": {"q": q}, "mlp": {"down": down}}},
    )
    shapes = jax.eval_shape(functions.init, jax.random.PRNGKey(0))
    chex.assert_trees_all_equal_structs(
        shapes,
        jax.tree.map(
            lambda _: 0,
            functions.logical_axes,
            is_leaf=lambda node: isinstance(node, tuple),
        ),
    )

  @parameterized.parameters(*_FAMILIES)
  def test_names_agree_with_the_jax_free_ones(self, **family):
    model, base, _, moved = make(**family)
    found = lora.kernel_names(model)
    lacking = set(policy_settings.LORA_TARGETS) - set(found)
    expected = {"gate", *policy_settings.DELTA, *policy_settings.LAYER_INPUTS}
    expected -= set(found)
    if not model.config.num_experts:
      expected |= {*policy_settings.EXPERTS}
    elif not model.config.shared_expert_width:
      expected |= {*policy_settings.MLP}
    latents = {*policy_settings.LATENTS, *policy_settings.LATENT_QUERIES}
    if family["family"] == "deepseek_v3":
      latents = {"k", "v"}
      queries = ("q",) if family["query_rank"] else ("q_a", "q_b")
      latents |= {*queries}
    self.assertEqual(lacking, expected | latents)
    self.assertContainsSubset(found, policy_settings.LORA_TARGETS)
    init = "scratch"
    # Models from scratch have none of these.
    others = {"delta", "shared_mlp", "layer_input"}
    if others & moved["blocks"].keys() or "kv_b" in found:
      init = self.create_tempdir().full_path
      hf.save(init, model.config, base)
    for name in policy_settings.LORA_TARGETS:
      problems = checks.lora_targets(
          {
              "lora.rank": 1,
              "lora.targets": name,
              "init": init,
              "model.family": family["family"],
              "model.num_experts": family.get("num_experts", 0),
          }
      )
      self.assertEqual(bool([*problems]), name in lacking)

  def test_each_expert_has_factors_of_its_own(self):
    _, _, functions, moved = make(**_FAMILIES[5])
    up = moved["blocks"]["mlp"]["up"]
    self.assertEqual(up["a"].shape, (2, 4, 2, 16))
    self.assertEqual(up["b"].shape, (2, 4, 32, 2))
    axes = functions.logical_axes["blocks"]["mlp"]
    self.assertEqual(
        axes["down"],
        {
            "a": ("layers", "experts", "lora_rank", "mlp"),
            "b": ("layers", "experts", "width", "lora_rank"),
        },
    )
    self.assertNotIn("router", axes)
    with self.assertRaisesRegex(
        ValueError, "config.export.adapter=True: peft has no"
    ):
      lora.peft_tensors(make(**_FAMILIES[5])[0].config, moved)

  @parameterized.parameters(
      (tiny_model.BOTH, {"shared_mlp"}),
      (tiny_model.SPARSE, {"shared_mlp", "dense_mlp"}),
      (tiny_model.LATENTS, {"shared_mlp", "dense_mlp"}),
  )
  def test_experts_have_adapters_only_by_name(self, family, modules):
    model = tiny_model.make_model(**family)
    axes = lambda targets: lora.make(
        settings(targets=targets), model
    ).logical_axes["blocks"]
    self.assertEqual(axes("gate,up,down").keys(), modules)
    self.assertEqual(axes("expert_up").keys(), {"mlp"})
    self.assertEqual(axes("expert_up")["mlp"].keys(), {"up"})
    self.assertEqual({*axes("up,expert_up")}, {*modules, "mlp"})

  def test_adapters_without_a_peft_format_are_merged(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    make_fn = lambda folder, rank=2, **family: lora.make_adapter_fn(
        settings(rank=rank), make(**family)[0], folder
    )
    self.assertIsNotNone(make_fn(folder))
    self.assertIsNone(make_fn(folder, rank=0))
    self.assertIsNone(make_fn(None))
    for family in (_FAMILIES[5], _FAMILIES[-1], tiny_model.STATES):
      self.assertIsNone(make_fn(folder, **family))
    os.rename(folder / "config.json", folder / "adapter_config.json")
    self.assertIsNone(make_fn(folder))

  @parameterized.product(family=_FAMILIES, target=["q", "o", "up", "all"])
  def test_served_adapters_have_a_peft_format(self, family, target):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    model = tiny_model.make_model(**family)
    if target != "all" and target not in lora.kernel_names(model):
      self.skipTest("the family has no such matrix")
    functions = lora.make(settings(targets=target), model)
    shapes = jax.eval_shape(functions.init, jax.random.PRNGKey(0))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape), shapes)
    names = policy_settings.lora_names(target)
    is_served = hf_names.are_served(model.config, names)
    tensors = lora.peft_tensors_or_none(model.config, folder, zeros)
    if target == "all":  # vLLM loads fewer matrices than peft.
      self.assertLessEqual(is_served, tensors is not None)
    else:
      self.assertEqual(is_served, tensors is not None)

  def test_refuses_an_unknown_target(self):
    gpt2 = make(**_FAMILIES[-1])[0]
    with self.assertRaisesRegex(ValueError, r"lora.targets='q,gate'.*\['gate'"):
      lora.make(settings(targets="q,gate"), gpt2)

  def test_a_bfloat16_base_stays_bfloat16(self):
    _, base, functions, moved = make()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    chex.assert_trees_all_equal_dtypes(functions.merge(half, moved), half)


class ConfigTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(lora__rank=-1), "lora.rank"),
      (dict(lora__alpha=0.0), "lora.alpha"),
      (dict(lora__targets="q,head"), "lora.targets"),
      (
          dict(lora__rank=2, lora__targets="gate", model__family="gpt2"),
          "lora.targets",
      ),
      (dict(lora__rank=2, reference__mode="reset"), "reference.mode"),
  )
  def test_wrong_settings_are_named(self, changes, key):
    with self.assertRaisesRegex(
        validate.ConfigError, rf"(?m)^config\.{key} = "
    ):
      validate.validate(base_config.make(**changes))

  def test_a_sweep_refuses_adapters(self):
    with self.assertRaisesRegex(ValueError, "config.lora.rank = 2"):
      validate.validate(base_config.make(lora__rank=2), program="sweep")

  def test_checks_targets_of_a_folder(self):
    # qwen2 has gated MLPs, gpt_neox does not.
    for family, wrong in (("qwen2", 0), ("gpt_neox", 1)):
      shape = next(s for s in _FAMILIES if s["family"] == family)
      model = tiny_model.make_model(**shape)
      folder = pathlib.Path(self.create_tempdir().full_path) / family
      hf.save(folder, model.config, tiny_model.init_params(model))
      c = {"lora.rank": 2, "lora.targets": "gate", "init": str(folder)}
      self.assertLen([*checks.lora_targets(c)], wrong)


class TrainTest(parameterized.TestCase):

  def make_state(self, **changes):
    """Returns (config, policy, base on a mesh, state before step 0)."""
    model, base, functions, _ = make(num_layers=1)
    config = tiny_model.make_config(**changes)
    mesh = sharding.make_mesh(config.mesh)
    policy = policy_lib.Policy(None, None, model, None, functions)
    base = jax.device_put(base, sharding.replicated(mesh))
    state = work_parts.init_state(config, policy, base, mesh)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        work_parts.abstract_state(config, policy, mesh), state
    )
    return config, policy, base, state

  @pytest.mark.slow
  def test_only_adapters_are_trained(self):
    config, policy, base, state = self.make_state()
    mesh = sharding.make_mesh(config.mesh)
    kept = jax.device_get(base)
    sizes = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    trained = sizes(state.params)
    self.assertLess(trained, sizes(base) / 2)
    # Two moments of each, and counters.
    self.assertBetween(sizes(state.opt_state), 2 * trained, 2 * trained + 4)
    step = work_parts.make_train_step(config, policy, mesh, base)
    ref = reference_policy.Reference(policy.model, base, temperature=1.0)
    batch = tiny_model.make_batch()
    before = self.logprobs(ref, batch)
    state, metrics = step(state, batch)
    # Before its first update the policy is its base; the two are compiled
    # apart, and may round a sum in another order.
    loss_fn = jax.jit(objective.make_loss_fn(config, policy.model))
    loss, _ = loss_fn(base, {}, batch, metrics["beta"])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    state, metrics = step(state, batch)
    self.assertGreater(metrics["grad_norm"], 0.0)
    for leaf in jax.tree.leaves(state.params):
      self.assertGreater(jnp.abs(leaf).max(), 0.0)
    chex.assert_trees_all_equal(jax.device_get(base), kept)
    # The reference stays the base.
    np.testing.assert_array_equal(self.logprobs(ref, batch), before)

  def test_a_value_model_starts_from_the_base(self):
    _, _, base, state = self.make_state(
        loss__name="ppo",
        loss__ratio_clip=0.2,
        loss__correction="decoupled",
        loss__proximal_every_steps=2,
    )
    value = state.loss_params["value"]
    chex.assert_trees_all_equal(value["blocks"], base["blocks"])
    held = state.proximal_params["params"]["blocks"]
    self.assertEqual({*held}, {"attention", "mlp"})
    self.assertEqual({*held["mlp"]["up"]}, {"a", "b"})

  def logprobs(self, ref, batch):
    return ref.logprobs(
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        batch.completion_mask,
    )

  def test_biases_and_sinks_have_no_adapters(self):
    model = tiny_model.make_model(
        family="gpt_oss", num_experts=4, experts_per_token=2
    )
    names = ("q", "k", "v", "o", *policy_settings.EXPERTS)
    self.assertCountEqual(lora.kernel_names(model), names)

  def test_matrices_of_latents_are_attentions_and_shared_ones_of_the_mlp(self):
    names = lora.kernel_names(tiny_model.make_model(**tiny_model.LATENTS))
    self.assertCountEqual(
        names,
        (
            *("q_a", "q_b", "kv_a", "kv_b", "o"),
            *(*policy_settings.MLP, *policy_settings.EXPERTS),
        ),
    )
    is_mlp = {name for name, of_mlp in names.items() if of_mlp}
    expected = {*policy_settings.MLP, *policy_settings.EXPERTS}
    self.assertEqual(is_mlp, expected)

  @parameterized.parameters(
      dict(num_layers=1),
      dict(
          num_layers=1,
          family="qwen3_moe",
          num_experts=4,
          experts_per_token=2,
      ),
      tiny_model.STATES,
      tiny_model.SPARSE,
      tiny_model.LATENTS,
  )
  @pytest.mark.slow
  def test_attached_and_merged_params_agree(self, **family):
    model, base, functions, moved = make(**family)
    tokens = np.arange(2, 10)[None]

    def loss(tree, put):
      params = put(base, tree)
      logits = model.logits(params, tokens, np.ones_like(tokens))
      return logits.var(), logits

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, logits), grads = run(moved, functions.attach)
    (_, merged_logits), merged_grads = run(moved, functions.merge)
    np.testing.assert_allclose(logits, merged_logits, rtol=1e-5, atol=1e-5)
    # The product gets the gradient that its merged kernel passes on.
    chex.assert_trees_all_close(grads, merged_grads, rtol=1e-3, atol=1e-6)
    start = jax.tree.map(jnp.zeros_like, moved)
    (_, base_logits), _ = run(start, functions.attach)
    self.assertGreater(np.abs(logits - base_logits).max(), 0.01)


class RunTest(absltest.TestCase):

  @pytest.mark.slow
  def test_a_resumed_run_refuses_another_reference_and_other_prompts(self):
    with tempfile.TemporaryDirectory() as folder:
      config = arithmetic.get_config("smoke")
      config.init = "scratch"
      scratch = policy_lib.make_policy(config, folder)
      where = pathlib.Path(folder) / "base"
      save = lambda seed: hf.save(
          where,
          scratch.model.config,
          tiny_model.init_params(scratch.model, seed=seed),
          scratch.tokenizer,
      )
      save(0)
      config.init = str(where)
      run, _ = run_directory.create(f"{folder}/run", config)
      policy = policy_lib.make_policy(config, run.workdir)
      saver = checkpoint.Checkpointer(f"{folder}/run/checkpoints", keep=2)
      self.addCleanup(saver.close)
      make = lambda policy=policy: work_parts.make_work(
          config, run, policy, cluster.Cluster(), saver
      )
      work, _ = make()
      work.save(0, {}, wait=True)
      work.close()
      make()[0].close()
      # Other prompts of the same number, as of a changed file.
      changed = config.copy_and_resolve_references()
      changed.task.split_seed = 1
      with self.assertRaisesRegex(ValueError, "config.task: the training prom"):
        make(policy_lib.make_policy(changed, run.workdir))
      save(1)
      with self.assertRaisesRegex(ValueError, "reference is 'model .*, not 'm"):
        make()
      # One that moves is in the checkpoint.
      config.reference.mode = "ema"
      self.assertEqual(work_parts.reference_name(config, policy), "")

  @pytest.mark.slow
  def test_publication_and_export_refuse_another_base(self):
    with tempfile.TemporaryDirectory() as folder:
      config = arithmetic.get_config("smoke")
      config.init = "scratch"
      scratch = policy_lib.make_policy(config, folder)
      start = tiny_model.init_params(scratch.model)
      where = pathlib.Path(folder) / "base"
      hf.save(where, scratch.model.config, start, scratch.tokenizer)
      config.init = str(where)
      config.lora.rank = 2
      workdir = f"{folder}/run"
      run_directory.create(workdir, config)
      policy = policy_lib.make_policy(config, workdir)
      mesh = sharding.make_mesh(config.mesh)
      state = work_parts.init_state(config, policy, start, mesh)
      moved = jax.tree.map(lambda x: x + 0.1, state.params)
      state = train_step.TrainState(**{**vars(state), "params": moved})
      # A searcher adds what is published to its own base.
      whole = lora.make_merger(
          policy.adapters,
          policy.folder,
          config.seed,
          roles.make_load_start(config, policy),
      )
      params_fn = roles.make_params_fn(policy, whole)
      expected = policy.adapters.merge(start, moved)
      found = params_fn(published.flatten(state.params))
      chex.assert_trees_all_close(found, expected, rtol=1e-6)
      to_adapter = lora.make_adapter_fn(
          config.lora, policy.model, policy.folder
      )
      unmerged = lora.ParamsMerger(whole.base, to_adapter)
      adapter = roles.make_params_fn(policy, unmerged, None)(
          published.flatten(state.params)
      )
      (sent := pathlib.Path(folder) / "sent").mkdir()
      adapter.write(sent)
      cache = {"XDG_CACHE_HOME": f"{folder}/cache"}
      with mock.patch.dict(os.environ, cache):
        chex.assert_trees_all_close(hf.load(str(sent))[1], found, atol=1e-6)
      saver = checkpoint.Checkpointer(f"{workdir}/checkpoints", keep=2)
      saver.save(0, state, {"base": whole.base})
      saver.close()
      exported = export.run(config, workdir, [f"{folder}/exported"])
      chex.assert_trees_all_equal(hf.load(exported)[1], found)
      config.export.adapter = True
      exported = export.run(config, workdir, [f"{folder}/adapter"])
      with mock.patch.dict(os.environ, cache):
        again = model_source.load("any", str(exported), bos="auto", dtype=None)
        chex.assert_trees_all_close(again.params, found, rtol=1e-6, atol=1e-7)
        text = "1+2="
        self.assertEqual(
            again.tokenizer.encode(text), policy.tokenizer.encode(text)
        )
        # Another adapter on top of it is no adapter of a base.
        config.init = str(exported)
        with self.assertRaisesRegex(ValueError, "adapters belong to base 'mod"):
          export.run(config, workdir, [f"{folder}/second"])
      config.init = str(where)
      # Adapters of another base are refused.
      other = jax.tree.map(lambda x: 2 * x, start)
      hf.save(where, scratch.model.config, other, scratch.tokenizer)
      with self.assertRaisesRegex(ValueError, "adapters belong to base 'model"):
        model_source.of_checkpoint(
            config, workdir, 0, model_source.one_device()
        )
      with self.assertRaisesRegex(ValueError, "adapters belong to base 'model"):
        export.run(config, workdir, [f"{folder}/adapter"])
