"""The rows of whole models have the sizes of published models, and distinct names."""

import pytest

from benchmarks.model_cases import CASES, FEATURES, OTHERS, ModelCase
from fused_norm.model_configs import FAMILIES

from .tiny_cases import MODEL_CASES


def test_rows_have_the_sizes_of_published_models_and_other_families_their_arguments():
    configs = {case: case.config() for case in {(case.shape, case.layers): case for case in CASES}.values()}
    for case, config in configs.items():
        for shape in FAMILIES[case.model_type].shapes if case.shape not in OTHERS else ():
            if shape.name == case.shape:
                sizes = (shape.hidden_size, shape.head_dim, shape.intermediate_size)
                assert (config.hidden_size, config.head_dim, config.intermediate_size) == sizes
                assert config.num_hidden_layers == (case.layers or shape.num_hidden_layers)


def test_a_name_stands_for_its_case_and_no_other():
    assert all(ModelCase.named(case.name) == case for case in (*CASES, *MODEL_CASES, *FEATURES))
    assert len({case.name for case in CASES}) == len(CASES)
    with pytest.raises(ValueError, match="no model"):
        ModelCase.named("Qwen3-0.6B dance 1x1")
