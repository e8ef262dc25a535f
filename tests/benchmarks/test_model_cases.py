"""The rows of whole models have the sizes of published models, and distinct names."""

import pytest

from benchmarks.model_cases import CASES, DEFAULT, FEATURES, OTHERS, ModelCase
from fused_norm.model_configs import FAMILIES

from .tiny_cases import MODEL_CASES


def test_rows_have_the_sizes_of_published_models_and_other_families_their_arguments():
    configs = {case: case.config() for case in {(case.shape, case.layers): case for case in CASES}.values()}
    assert set(OTHERS) == {case.shape for case in configs} & set(OTHERS)
    others = {case.shape: config for case, config in configs.items() if case.shape in OTHERS}
    assert others["LiquidAI/LFM2-1.2B"].layer_types.count("full_attention") == 6
    assert others["Qwen/Qwen2.5-VL-3B (8 and 8 layers)"].vision_config.depth == 8
    for case, config in configs.items():
        for shape in FAMILIES[case.model_type].shapes if case.shape not in OTHERS else ():
            if shape.name == case.shape:
                sizes = (shape.hidden_size, shape.head_dim, shape.intermediate_size)
                assert (config.hidden_size, config.head_dim, config.intermediate_size) == sizes
                assert config.num_hidden_layers == (case.layers or shape.num_hidden_layers)


def test_a_name_stands_for_its_case_and_no_other():
    every = (*CASES, *MODEL_CASES, *FEATURES)
    assert all(ModelCase.named(case.name) == case for case in every)
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(DEFAULT) < set(CASES)
    assert ModelCase.named("Qwen3-8B (3 layers) lora 2x7").config().num_hidden_layers == 3
    assert ModelCase.named("tiny-llama masked lora 1x8").name == "tiny-llama lora loss masked 1x8", "labels have a loss"
    for name in ("Qwen3-5B 1x1", "Qwen3-0.6B", "Qwen3-0.6B dance 1x1", "tiny-gpt 1x1"):
        with pytest.raises(ValueError, match="no model"):
            ModelCase.named(name)
