"""Which families of models store their tensors under the names that the model itself uses. No imports."""

PLAIN = frozenset(
    {
        "bert",
        "bloom",
        "cohere",
        "distilbert",
        "electra",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "granite",
        "helium",
        "llama",
        "mamba",
        "ministral3",
        "mistral",
        "mpt",
        "nemotron",
        "olmo",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "roberta",
        "smollm3",
        "stablelm",
        "starcoder2",
        "t5",
    }
)
"""Families (``model_type``) without rules of conversion in transformers; a test asks transformers itself."""
