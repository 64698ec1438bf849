"""Tied weights: names that a model has and its checkpoint does not store, since one tensor serves both."""

from collections.abc import Collection, Mapping

from loadstone.loader.format.naming import quote

_HEADS = (
    # The embedding, and what shares its weight; a name further up is also the end of none further down.
    ("language_model.model.embed_tokens.weight", ("language_model.lm_head.weight",)),
    ("shared.weight", ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")),
    ("model.language_model.embed_tokens.weight", ("lm_head.weight",)),
    ("model.decoder.embed_tokens.weight", ("lm_head.weight",)),
    ("model.embed_tokens.weight", ("lm_head.weight",)),
    ("transformer.wte.weight", ("lm_head.weight",)),
    ("wte.weight", ("lm_head.weight",)),
    ("transformer.word_embeddings.weight", ("lm_head.weight",)),
    ("word_embeddings.weight", ("lm_head.weight",)),
    ("gpt_neox.embed_in.weight", ("embed_out.weight",)),
    ("backbone.embeddings.weight", ("lm_head.weight",)),
    ("biogpt.embed_tokens.weight", ("output_projection.weight",)),
    ("transformer.w.weight", ("lm_head.weight",)),
    ("transformer.tokens_embed.weight", ("lm_head.weight",)),
    ("transformer.embeddings.weight", ("pred_layer.proj.weight",)),
    ("transformer.word_embedding.weight", ("lm_loss.weight",)),
    ("bert.embeddings.word_embeddings.weight", ("cls.predictions.decoder.weight",)),
    ("roberta.embeddings.word_embeddings.weight", ("lm_head.decoder.weight",)),
)
_TIED_BY_DEFAULT = frozenset(
    {
        "biogpt",
        "bloom",
        "ctrl",
        "falcon",
        "falcon_mamba",
        "flaubert",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "mamba",
        "openai-gpt",
        "opt",
        "t5",
        "xlm",
        "xlnet",
    }
)
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")


def tied(config: Mapping[str, object], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Find the names that a tied weight goes by besides its own.

    Parameters
    ----------
    config : Mapping[str, object]
        The folder's ``config.json``.
    names : Collection[str]
        The tensors that are stored.

    Returns
    -------
    dict[str, str]
        Name that is not stored, to the stored tensor it stands for.
    list[str]
        A warning, where the config says that the head is a weight of its own and there is none.
    """
    pair = next(((embedding, heads) for embedding, heads in _HEADS if embedding in names), None)
    if pair is None:
        return {}, []
    embedding, heads = pair
    absent = [head for head in heads if head not in names]
    if _is_tied(config):
        return dict.fromkeys(absent, embedding), []
    if heads[0] in absent and _says_untied(config) and _has_head(config):
        return {}, [
            f"{quote(heads[0])} is not stored, yet config.json says that it is not tied to "
            f"{quote(embedding)}; a model with such a head lacks that weight"
        ]
    return {}, []


def _is_tied(config: Mapping[str, object]) -> bool:
    said = _tie_setting(config)
    return said is True or (said is None and config.get("model_type") in _TIED_BY_DEFAULT)


def _says_untied(config: Mapping[str, object]) -> bool:
    return _tie_setting(config) is False


def _tie_setting(config: Mapping[str, object]) -> object:
    """Return the setting, from the language model's own part of the config where it has one."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and "tie_word_embeddings" in text and "tie_word_embeddings" not in config:
        return text["tie_word_embeddings"]
    return config.get("tie_word_embeddings")


def _has_head(config: Mapping[str, object]) -> bool:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return True
    return any(str(name).endswith(_WITH_HEAD) for name in architectures)
