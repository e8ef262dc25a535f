"""The rows of whole models have the sizes of published models, and names that tell them apart."""

from __future__ import annotations

import pytest

from benchmarks.model_cases import CASES, DEFAULT, OTHERS, QUICK, QUICK_BY_NAME, ModelCase
from fused_norm.model_configs import FAMILIES


def test_rows_have_the_sizes_of_published_models():
    for case in {(case.shape, case.layers): case for case in CASES if case.shape not in OTHERS}.values():
        config = case.config()
        shape = next(shape for shape in FAMILIES[case.model_type].shapes if shape.name == case.shape)
        assert config.hidden_size == shape.hidden_size
        assert config.num_hidden_layers == (case.layers or shape.num_hidden_layers)
        assert (config.head_dim, config.intermediate_size) == (shape.head_dim, shape.intermediate_size)


def test_models_of_other_families_have_their_arguments_beside_the_defaults_of_their_config():
    cases = {case.shape: case.config() for case in CASES if case.shape in OTHERS}
    assert set(cases) == set(OTHERS)
    assert cases["LiquidAI/LFM2-1.2B"].layer_types.count("full_attention") == 6
    assert cases["Qwen/Qwen2.5-VL-3B (8 and 8 layers)"].vision_config.depth == 8
    assert cases["Qwen/Qwen3-Next (4 layers, 16 experts)"].linear_num_value_heads == 32


def test_a_name_says_model_step_and_batch_and_is_of_one_row():
    names = [case.name for case in (*CASES, *QUICK, *QUICK_BY_NAME)]
    assert len(set(names)) == len(names)
    some = {"Qwen3-0.6B 4x4096", "Qwen3-0.6B train 4x4096", "Qwen3-8B (8 layers) 4x4096", "tiny-qwen3 generate 1x2"}
    assert some <= set(names)
    assert set(DEFAULT) < set(CASES)


def test_a_shape_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"no shape 'Qwen/Qwen3-5B' of qwen3; there are Qwen/Qwen3-0\.6B"):
        ModelCase("qwen3", "Qwen/Qwen3-5B", 1, 1).config()
