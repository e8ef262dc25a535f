"""The sweep over all model types of transformers: what they have, counted without the patcher, and what it fuses."""
