# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A searcher on four devices: params, samples, refused settings."""

import dataclasses
import functools
import math
import pathlib
import threading
import types
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import numpy as np

from tba_jax.config import settings as settings_lib
from tba_jax.learning import group_reference
from tba_jax.learning import published
from tba_jax.mesh import sharding
from tba_jax.policy import lora
from tba_jax.programs import roles
from tba_jax.sampling import decode
from tba_jax.sampling import requests
from tba_jax.sampling import sharing
from tba_jax.sampling import slots as slots_lib
from tba_jax.system import hlo
from tba_jax.transport.params import orbax_shards
from tba_jax.transport.params import shared_files
from tba_jax.transport.params import store_chunks
from tba_jax.transport.params import version
from tests.support import cpu_devices
from tests.support import in_process
from tests.support import scripted_turns
from tests.support import tiny_model

cpu_devices.make(4)

VERSION = version.Version(1, 3)
SETTINGS = decode.Settings(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    max_prompt_tokens=4,
    max_completion_tokens=12,
    num_rows=64,
    chunk_steps=3,
    stop_ids=(1,),
    pad_id=0,
    seed=0,
    recompute_cache=True,
)
KEYS = {"run_id": "run", "secret": b"s" * 32, "deadline_s": 60.0}


def setUpModule():
  cpu_devices.skip_without(4)


def make_policy(rank=0, **changes):
  model = tiny_model.make_model(**{"num_kv_heads": 2, **changes})
  settings = {"rank": rank, "alpha": 4.0, "targets": "all"}
  adapters = lora.make(settings, model)
  return types.SimpleNamespace(
      model=model, adapters=adapters, trained=adapters or model, folder=None
  )


def make_place(policy, events=None, **sizes):
  search = settings_lib.get_config().search
  search.mesh.update(sizes)
  on_event = lambda *event: None if events is None else events.append(event)
  mesh = sharding.searcher_mesh(search, on_event)
  return sharding.make_place(mesh, policy)


def make_mesh(**sizes):
  whole = dict.fromkeys(sharding.MESH_AXES, 1) | sizes
  return sharding.make_mesh(whole, jax.devices()[: math.prod(sizes.values())])


def _check_same_shardings(test, params, cut):
  """Checks that decode params are on the same devices."""
  is_same = lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim)
  same = jax.tree.map(is_same, params, cut)
  test.assertTrue(jax.tree.all((same.layers, same.others)))


class MeshTest(parameterized.TestCase):

  def test_too_few_devices_give_one_error(self):
    with self.assertRaisesRegex(
        ValueError, "config.search.mesh=.* needs 8 devices, 4 of cpu are here;"
    ):
      make_place(make_policy(), data=4, tensor=2)

  @parameterized.parameters(
      (dict(num_heads=6), "tensor of size 4: 6 query heads .* padded to 8"),
      (dict(mlp_width=34), ".*/down/kernel: axis 2 of"),
  )
  def test_indivisible_axis_is_named(self, changes, problem):
    with self.assertRaisesRegex(
        ValueError, f"do not fit config.search.mesh: {problem}"
    ):
      make_place(make_policy(**changes), tensor=4)

  @parameterized.parameters((dict(data=1), 1), (dict(fsdp=2), 2))
  def test_idle_devices_are_reported(self, sizes, used):
    events = []
    place = make_place(make_policy(), events, **sizes)
    ((kind, message),) = events
    self.assertEqual(kind, "idle_devices")
    self.assertIn(f"uses {used} of the 4 devices", message)
    self.assertEqual(place is sharding.ONE_DEVICE, used == 1)
    events.clear()
    make_place(make_policy(), events, data=2, tensor=2)
    self.assertEmpty(events)


class SamplingTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.policy = make_policy()
    cls.params_of = {
        version: jax.device_get(
            cls.policy.model.init(jax.random.PRNGKey(version))
        )
        for version in range(3)
    }
    cls.expected = cls.sample(sharding.ONE_DEVICE)

  @classmethod
  def sample(cls, place, check=lambda programs: None, **changes):
    """Returns completions by three versions, the newer ones swapped in."""
    params_fn = roles.make_params_fn(
        cls.policy, lora.ParamsMerger("", lambda params: params), place
    )
    settings = dataclasses.replace(SETTINGS, **changes)
    sampler = decode.JaxSampler(cls.policy.model, settings)
    params = {
        version: sampler.put(params_fn(published.by_path(leaves)), place.model)
        for version, leaves in cls.params_of.items()
    }
    looks = iter(range(100))

    def newer():
      version = next(looks) // 2
      return (version, params[version]) if version in (1, 2) else None

    asked = [
        decode.Request(np.arange(2, 3 + i % 4, dtype=np.int32), i, 0, 8)
        for i in range(11)
    ]
    sampler.warm_up(params[0])
    programs = sampler.programs(sampler.put(params[0]))
    sizes = [
        program._cache_size()
        for program in (programs.decode_chunk, programs.refill)
    ]
    result = sampler.sample(params[0], asked, version=0, newer=newer)
    # Newer params do not compile again.
    assert sizes == [
        program._cache_size()
        for program in (programs.decode_chunk, programs.refill)
    ]
    check(programs)
    return result

  @parameterized.parameters(
      dict(data=4),
      dict(tensor=2),
      dict(tensor=4),
      dict(fsdp=4),
      dict(data=2, tensor=2),
      dict(fsdp=2, tensor=2),
  )
  def test_mesh_changes_only_rounding(self, **sizes):
    tensor = sizes.get("tensor", 1)

    def check(programs):
      state = programs.empty_state()
      num_rows = 64 * tensor // math.prod(sizes.values())
      for leaf in jax.tree.leaves(state):
        shard = leaf.sharding.shard_shape(leaf.shape)
        self.assertEqual(shard[0], num_rows)
        if leaf.ndim == 4:
          self.assertEqual(shard[1], leaf.shape[1] // tensor)

    result = self.sample(make_place(self.policy, **sizes), check)
    for one, other in zip(result, self.expected, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
      np.testing.assert_array_equal(one.token_versions, other.token_versions)
    newest = max(one.token_versions.max() for one in result)
    self.assertEqual(newest, 2)

  @mock.patch.object(sharing, "OWN_PROMPTS", ())
  def test_prompts_are_sharded_with_their_rows(self):

    def check(programs):
      state = programs.abstract_state
      shape = state.prompt_mask.sharding.shard_shape(state.prompt_mask.shape)
      # 12 rows that share a prompt would not divide a device's 32.
      self.assertEqual(shape, (32 // 4, 4))

    place = make_place(self.policy, data=2, tensor=2)
    actual = self.sample(place, check, most_rows_per_prompt=12)
    expected = self.sample(sharding.ONE_DEVICE, most_rows_per_prompt=12)
    for one, other in zip(actual, expected, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)

  @parameterized.parameters(
      (tiny_model.STATES, 0, "state", (32, 1, 4, 6)),
      # Latents are whole on each device.
      (tiny_model.LATENTS, 1, "v", (32, 1, 12)),
      # A head a device; global layers have wider ones.
      (tiny_model.SHARED, 0, "v", (32, 1, 4)),
      (tiny_model.SHARED, 1, "v", (32, 1, 8)),
  )
  @mock.patch.object(sharing, "OWN_PROMPTS", ())
  def test_states_and_latents_are_sharded_with_their_rows(
      self, shape, layer, name, expected_shape
  ):
    policy = make_policy(**shape)
    init = lambda n: policy.model.init(jax.random.PRNGKey(n))
    params_of = {n: jax.device_get(init(n)) for n in range(3)}

    def check(programs):
      leaf = programs.abstract_state.cache[1]["layers"][layer][name]
      shape = leaf.sharding.shard_shape(leaf.shape)
      if name == "v":  # Without the number of columns.
        shape = shape[:2] + shape[3:]
      self.assertEqual(shape, expected_shape)

    with mock.patch.multiple(SamplingTest, policy=policy, params_of=params_of):
      place = make_place(policy, data=2, tensor=2)
      actual = self.sample(place, check, most_rows_per_prompt=12)
      expected = self.sample(sharding.ONE_DEVICE, most_rows_per_prompt=12)
    for one, other in zip(actual, expected, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)

  def test_rows_make_room_on_their_own_device(self):
    settings = dataclasses.replace(
        SETTINGS, num_rows=8, num_waiting=8, has_turns=True
    )
    asked = [
        decode.Request(np.array([2 + i], np.int32), i, 0, 12) for i in range(4)
    ]
    result = []
    for sizes in ({}, dict(data=2, tensor=2)):
      place = sharding.ONE_DEVICE
      if sizes:
        place = make_place(self.policy, **sizes)
      sampler = decode.JaxSampler(self.policy.model, settings)
      params = sampler.put(self.params_of[0], place.model)
      turns = scripted_turns.Scripted(20)
      result.append(sampler.sample(params, asked, version=0, turns=turns))
      self.assertGreater(turns.most_live, 8)
    for one, other in zip(*result, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_array_equal(one.sampled_mask, other.sampled_mask)
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)

  def test_prefill_is_shared_out(self):
    flops = []
    for sizes in ({}, dict(data=4)):
      sampler = decode.JaxSampler(self.policy.model, SETTINGS)
      place = make_place(self.policy, **sizes)
      params = sampler.put(self.params_of[0], place.model)
      programs = slots_lib.SlotPrograms(
          self.policy.model, SETTINGS, slots_lib.params_sharding(params)
      )
      shape = SETTINGS.prefill_size, SETTINGS.max_prompt_tokens
      compiled = programs.prefill.lower(
          params, np.zeros(shape, np.int32), np.zeros(shape, np.float32)
      ).compile()
      flops.append(hlo.costs(compiled.as_text()).flops)
    self.assertGreater(flops[1], 0)
    self.assertEqual(flops[0], 4 * flops[1])


class SplitVocabularyTest(parameterized.TestCase):

  @parameterized.parameters(
      {},
      dict(temperature=0.0),
      dict(temperature=0.7, top_k=9),
      dict(top_p=0.8, min_p=0.01),
      dict(top_k=50, top_p=0.9, explore=requests.Explore(0.5, 0.5, 2.0, 4)),
  )
  def test_tokens_match_one_device(self, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    rng = np.random.default_rng(0)
    logits_RxV = rng.normal(size=(64, 1000)).astype(np.float32) * 3
    # The likeliest twice, in the parts of two devices.
    logits_RxV[:, [10, 700]] = 9.0
    keys_Rx2 = rng.integers(0, 2**32, (64, 2), np.uint32)
    position_R = np.arange(64, dtype=np.int32) // 8
    result = []
    for sizes in (dict(data=1), dict(data=2, tensor=2), dict(tensor=4)):
      mesh = make_mesh(**sizes)
      draw = functools.partial(
          slots_lib.draw, settings, sharding.replicated(mesh)
      )
      result.append(jax.jit(draw)(logits_RxV, keys_Rx2, position_R))
    for other in result[1:]:
      np.testing.assert_array_equal(other[0], result[0][0])
      chex.assert_trees_all_close(
          other[1:], result[0][1:], rtol=1e-5, atol=1e-5
      )

  def test_logits_and_cache_are_sharded(self):
    model = tiny_model.make_model(num_kv_heads=2, vocab_size=4096)
    mesh = make_mesh(data=2, tensor=2)
    shardings = sharding.param_shardings(mesh, model)
    params = jax.device_put(model.init(jax.random.PRNGKey(0)), shardings)
    programs = slots_lib.SlotPrograms(
        model, SETTINGS, slots_lib.params_sharding(params)
    )
    state, count = programs.abstract_state, np.int32(3)
    decode_params = decode.JaxSampler(model, SETTINGS).put(params)
    prompts = np.zeros((SETTINGS.prefill_size, 4), np.int32)
    prefilled = jax.eval_shape(
        programs.prefill, decode_params, prompts, prompts.astype(np.float32)
    )
    whole = lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=programs.sharding
    )
    slots = np.zeros(64, np.int32)
    ids = np.zeros((64, 4), np.uint32)
    for lowered in (
        programs.decode_chunk.lower(decode_params, state, count, count, 2),
        programs.refill.lower(
            state, jax.tree.map(whole, prefilled), slots, ids, slots
        ),
    ):
      received = hlo.costs(lowered.compile().as_text()).collectives
      # The logits of one row are 16 KB; a row's cache is 1 KB a block.
      self.assertLess(received.get("all-gather", 0), 16e3)
      self.assertLess(sum(received.values()), 64e3)


class CarriersTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.store = in_process.InProcessStore()
    self.transport = in_process.InProcessTransport(self.store)
    self.transport.put(f"p/{VERSION.tag}/meta", b"the manifest")
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.policy = make_policy()
    self.params = self.policy.model.init(jax.random.PRNGKey(0))

  def make(self, name):
    if name == "store":
      carrier = store_chunks.StoreChunks()
    elif name == "files":
      carrier = shared_files.SharedFiles(
          self.folder / "files", run_id="run", secret=KEYS["secret"]
      )
    else:
      path = str(self.folder / "run" / "shards")
      carrier = orbax_shards.OrbaxShards(path, **KEYS)
    self.addCleanup(carrier.close)
    return carrier

  def serve(self, writer, packed):
    stop = threading.Event()
    transport = in_process.InProcessTransport(self.store)

    def run():
      while not stop.wait(0.01):
        writer.serve(transport, packed)

    thread = threading.Thread(target=run)
    thread.start()
    self.addCleanup(thread.join)
    self.addCleanup(stop.set)

  @parameterized.product(
      name=("store", "files", "orbax"),
      sizes=(dict(data=2, tensor=2), dict(fsdp=4)),
  )
  def test_params_are_put_on_mesh(self, name, sizes):
    place = make_place(self.policy, **sizes)
    leaves = published.by_path(self.params)
    writer, reader = self.make(name), self.make(name)
    packed = writer.pack(VERSION, leaves)
    writer.send(self.transport, packed)
    self.serve(writer, packed)
    specs = version.specs_of(leaves)
    result = reader.read(self.transport, VERSION.tag, packed.carried, specs)
    params_fn = roles.make_params_fn(
        self.policy, lora.ParamsMerger("", lambda params: params), place
    )
    sampler = decode.JaxSampler(self.policy.model, SETTINGS)
    params = sampler.put(params_fn(result), place.model)
    chex.assert_trees_all_equal(params, sampler.put(self.params))
    # A program cuts them where they are.
    cut = sampler.put(jax.device_put(self.params, place.model))
    _check_same_shardings(self, params, cut)

  def test_matrices_of_int8_are_put_on_mesh(self):
    place = make_place(self.policy, data=2, tensor=2)
    settings = dataclasses.replace(SETTINGS, weights="int8")
    sampler = decode.JaxSampler(self.policy.model, settings)
    params = sampler.put(jax.device_get(self.params), place.model)
    chex.assert_trees_all_equal(params, sampler.put(self.params))
    cut = sampler.put(jax.device_put(self.params, place.model))
    _check_same_shardings(self, params, cut)
    q = params.layers[0]["attention"]["q"]["kernel"]
    self.assertEqual(q.values.dtype, np.int8)
    # Heads of both are split in two.
    for x in (q.values, q.scale):
      self.assertEqual(x.sharding.shard_shape(x.shape)[0], len(x) // 2)

  def test_adapters_are_merged_on_mesh(self):
    policy = make_policy(rank=2)
    config = settings_lib.get_config()
    place = make_place(policy, data=2, tensor=2)
    whole = lora.make_merger(
        policy.adapters,
        policy.folder,
        config.seed,
        roles.make_load_start(config, policy, place),
    )
    factors = jax.tree.map(
        lambda x: x + 0.1, policy.adapters.init(jax.random.PRNGKey(3))
    )
    params_fn = roles.make_params_fn(policy, whole, place)
    actual = params_fn(published.flatten(factors))
    start = policy.model.init(jax.random.PRNGKey(config.seed))
    expected = policy.adapters.merge(start, factors)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, actual)
    chex.assert_trees_all_equal(shardings, place.model)

  def test_sharded_reference_matches_one_device(self):
    policy, config = make_policy(), settings_lib.get_config()
    policy.tokenizer = types.SimpleNamespace(stop_ids=(1,))
    config.reference.role = "searcher"
    config.sampling.max_prompt_tokens = 4
    config.sampling.max_completion_tokens = 6
    config.search.samples_per_prompt = 3
    config.search.prompts_per_round = 8
    config.sampling.num_slots = 15
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(2, tiny_model.VOCAB, shape).astype("i4")
    groups = (
        [draw(n) for n in (1, 4, 2, 3, 4)],
        [draw(3, 6) for _ in range(5)],
        [lengths := np.array([6, 2, 1], "i4")] * 5,
        [np.arange(6) < lengths[:, None]] * 5,
        [None] * 5,
    )
    result = []
    for sizes in (dict(), dict(data=2, tensor=2)):
      config.search.mesh.update(sizes)
      mesh = sharding.make_mesh({"sequence": 1, **config.search.mesh})
      place = sharding.make_place(mesh, policy)
      ours = group_reference.make_group_reference(
          config, policy, roles.make_load_start(config, policy, place), mesh
      )
      result.append(ours.start(*groups)())
    np.testing.assert_allclose(*map(np.stack, result), rtol=1e-5, atol=1e-5)
