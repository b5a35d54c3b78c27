"""What load_runner makes of a path: a model, or one sentence that says what is wrong and where."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from guidevane_api.limits import Envelope
from guidevane_runtime.engine import weights_load
from guidevane_runtime.engine.model_config import Llama3RopeScaling
from guidevane_runtime.engine.model_rope import inverse_frequencies
from guidevane_runtime.engine.runner import LoadedModel
from guidevane_runtime.engine.weights import open_source
from guidevane_runtime.errors import BrokenModel, DeviceError, ModelLoadError, ModelNotFound, UnsupportedModel

Load = Callable[..., LoadedModel]
MakeDir = Callable[..., Path]

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@pytest.fixture
def model_dir(tiny_model_dir: MakeDir) -> Path:
    return tiny_model_dir()


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's conversion of q and k, as its convert_hf_to_gguf.py has it."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    source: Path, target: Path, kinds: dict[str, gguf.GGMLQuantizationType], rope_freqs: np.ndarray | None = None
) -> Path:
    """Convert a HuggingFace directory; `kinds` maps parts of GGUF names to storage types, float32 otherwise."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_token_list([f"t{token}" for token in range(config["vocab_size"])])
    for hf_name, tensor in load_file(source / "model.safetensors").items():
        name, values = hf_name, tensor.numpy()
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        if "attn_q" in name:
            values = permuted(values, config["num_attention_heads"])
        if "attn_k" in name:
            values = permuted(values, config["num_key_value_heads"])
        kind = next((kind for part, kind in kinds.items() if part in name), gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_a_model_says_what_the_engine_must_know(model_dir: Path, load: Load) -> None:
    loaded = load(model_dir, block_size=8)

    assert (loaded.block_size, loaded.dtype, loaded.device) == (8, "float32", "cpu")
    assert loaded.eos_token_ids == {2}
    assert loaded.max_model_len == loaded.config.max_model_len == 512
    assert loaded.num_blocks >= 1


def test_the_envelope_shortens_the_model(model_dir: Path, load: Load) -> None:
    assert load(model_dir, envelope=Envelope(max_model_len=100)).max_model_len == 100
    assert load(model_dir, envelope=Envelope(max_model_len=9999)).max_model_len == 512


def test_a_cache_is_never_larger_than_the_envelope_can_fill(model_dir: Path, load: Load) -> None:
    assert load(model_dir, envelope=Envelope(max_num_seqs=2, max_model_len=33)).num_blocks == 2 * 3


def test_a_file_uri_is_a_path(model_dir: Path, load: Load) -> None:
    assert load(f"file://{model_dir}").config == load(model_dir).config


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_loads_and_runs_in_sixteen_bits(dtype: str, model_dir: Path, load: Load) -> None:
    assert load(model_dir, dtype=dtype).dtype == dtype


def test_a_gguf_holds_the_same_weights_in_another_order(model_dir: Path, tmp_path: Path) -> None:
    kinds = {"ffn_up": gguf.GGMLQuantizationType.F16, "attn_v": gguf.GGMLQuantizationType.BF16}
    path = write_gguf(model_dir, tmp_path / "tiny.gguf", kinds)

    theirs, ours = open_source(str(model_dir)), open_source(str(path))

    # GGUF stores 32-bit floats
    epsilon = pytest.approx(theirs.config.rms_norm_eps, rel=1e-6)
    assert ours.config.rms_norm_eps == epsilon
    assert replace(ours.config, rms_norm_eps=theirs.config.rms_norm_eps) == theirs.config
    assert set(ours.shapes) == set(theirs.shapes)
    for name in theirs.shapes:
        # 2**-8: the precision of bfloat16
        torch.testing.assert_close(ours.read(name), theirs.read(name), rtol=2**-8, atol=1e-6)


def test_quantised_tensors_come_out_near_their_originals(tiny_model_dir: MakeDir, tmp_path: Path) -> None:
    path = tiny_model_dir(hidden_size=96, num_attention_heads=6, intermediate_size=64)
    kinds = {"ffn_": gguf.GGMLQuantizationType.Q8_0, "attn_q": gguf.GGMLQuantizationType.Q4_1}
    kinds = {"_norm": gguf.GGMLQuantizationType.F32, **kinds}

    theirs, ours = open_source(str(path)), open_source(str(write_gguf(path, tmp_path / "tiny.gguf", kinds)))

    for name, tolerance in (("mlp.gate_proj", 0.02), ("self_attn.q_proj", 0.2)):
        original = theirs.read(f"model.layers.0.{name}.weight")
        assert (ours.read(f"model.layers.0.{name}.weight") - original).abs().max() < tolerance


def test_rope_freqs_of_a_gguf_stretch_the_rotation(model_dir: Path, tmp_path: Path, load: Load, drive: Any) -> None:
    from guidevane_runtime.core.messages import SamplingParams

    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config_file = model_dir / "config.json"
    plain = open_source(str(model_dir)).config
    scaled_dir = shutil.copytree(model_dir, tmp_path / "scaled")
    (scaled_dir / "config.json").write_text(
        json.dumps({**json.loads(config_file.read_text()), "rope_parameters": rope})
    )
    scaled = open_source(str(scaled_dir)).config
    assert isinstance(scaled.rope_scaling, Llama3RopeScaling)
    divisors = (inverse_frequencies(plain) / inverse_frequencies(scaled)).numpy()
    path = write_gguf(model_dir, tmp_path / "scaled.gguf", {}, rope_freqs=divisors)
    prompt, greedy = list(range(10, 90)), SamplingParams(max_tokens=20, seed=0, temperature=0.0)

    outputs = [drive(load(source)).generate([prompt], [greedy], num_tokens=20) for source in (scaled_dir, path)]

    assert outputs[0] == outputs[1]


def test_a_folder_with_one_gguf_is_that_gguf(model_dir: Path, tmp_path: Path) -> None:
    write_gguf(model_dir, tmp_path / "only.gguf", {})

    assert open_source(str(tmp_path)).path.name == "only.gguf"

    shutil.copy(tmp_path / "only.gguf", tmp_path / "another.gguf")
    with pytest.raises(UnsupportedModel, match=r"2 GGUF files \(another.gguf, only.gguf\)"):
        open_source(str(tmp_path))


def test_progress_is_logged_with_percent_and_elapsed_time(
    model_dir: Path, caplog: pytest.LogCaptureFixture, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_load, "PROGRESS_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO):
        load(model_dir)

    progress = [record for record in caplog.records if record.message == "loading weights"]
    assert progress[-1].percent == 100
    assert progress[-1].elapsed_s >= 0


# ------------------------------------------------------------------------------------------------------- refusals


def remove_config(path: Path) -> None:
    (path / "config.json").unlink()


def remove_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def leave_pickles_only(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def break_json(path: Path) -> None:
    (path / "config.json").write_text('{"vocab_size": 1')


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def truncate_header(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def drop_tensor(path: Path) -> None:
    edit_weights(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def reshape_tensor(path: Path) -> None:
    edit_weights(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))


def add_bias(path: Path) -> None:
    edit_weights(path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))


def lose_shard(path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN_DIRS = [
    (remove_config, ModelNotFound, "neither config.json nor a *.gguf"),
    (remove_weights, ModelNotFound, "no *.safetensors"),
    (leave_pickles_only, UnsupportedModel, "pytorch_model.bin"),
    (break_json, BrokenModel, "config.json is not readable JSON"),
    (truncate, BrokenModel, "model.safetensors is not a whole safetensors file"),
    (truncate_header, BrokenModel, "model.safetensors is not a whole safetensors file"),
    (drop_tensor, BrokenModel, "model.layers.1.mlp.up_proj.weight is missing"),
    (reshape_tensor, BrokenModel, "model.norm.weight has shape [7], the config asks for [48]"),
    (add_bias, UnsupportedModel, "q_proj.bias has no place in LlamaForCausalLM"),
    (lose_shard, BrokenModel, "model-00002-of-00002.safetensors is missing"),
]


@pytest.mark.parametrize(("damage", "error", "words"), BROKEN_DIRS, ids=[row[0].__name__ for row in BROKEN_DIRS])
def test_a_directory_that_cannot_be_loaded_says_why(
    damage: Callable[[Path], None], error: type[ModelLoadError], words: str, model_dir: Path, load: Load
) -> None:
    damage(model_dir)

    with pytest.raises(error) as caught:
        load(model_dir)

    assert words in str(caught.value)
    assert str(model_dir) in str(caught.value)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path, load: Load) -> None:
    with pytest.raises(ModelNotFound, match=f"{tmp_path}/nothing does not exist"):
        load(tmp_path / "nothing")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, load: Load) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 not a model")

    with pytest.raises(UnsupportedModel, match="is not a GGUF file"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.5, 0.95])
def test_a_gguf_cut_anywhere_is_reported_as_cut(share: float, model_dir: Path, tmp_path: Path, load: Load) -> None:
    path = write_gguf(model_dir, tmp_path / "tiny.gguf", {})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])

    with pytest.raises(BrokenModel, match=r"tiny.gguf is cut short or damaged"):
        load(path)


def test_settings_that_the_machine_cannot_meet_are_refused(model_dir: Path, load: Load) -> None:
    with pytest.raises(DeviceError, match=r"dtype is 'int3'; it is one of auto, float32"):
        load(model_dir, dtype="int3")
    with pytest.raises(DeviceError, match=r"device is 'tpu'; it is one of auto, cpu, cuda"):
        load(model_dir, device="tpu")
    with pytest.raises(DeviceError, match=r"raise --kv-cache-memory to 12288 bytes or more"):
        load(model_dir, kv_cache_bytes=10_000)


def test_what_the_kernels_refuse_is_worth_no_restart(
    model_dir: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUIDEVANE_KERNELS_PROVIDER", "abacus")
    with pytest.raises(DeviceError, match="unknown kernels provider 'abacus'; use auto, torch or triton"):
        load(model_dir)


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_loaded(model_dir: Path, load: Load) -> None:
    with pytest.raises(DeviceError, match=r"MiB for its KV cache, the memory limit is \d+ MiB; raise resources"):
        load(model_dir, kv_cache_bytes=1 << 50)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_without_a_gpu_is_refused(model_dir: Path, load: Load) -> None:
    with pytest.raises(DeviceError, match="no CUDA device is visible"):
        load(model_dir, device="cuda")
