"""Catalogue of models: torchvision's families, transformers' classes, and small modules.

An entry is a function that returns a module with seeded weights, and an example of its inputs.
torchvision's models get their usual image size; transformers' models are small configurations.
Names are those of the two libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from .odd import ODD

Inputs = tuple[Any, ...] | dict[str, Any]  # positional or keyword arguments, perhaps nested
Made = tuple[nn.Module, Inputs]
Entry = Callable[[], Made]

PICTURES: Final = {
    224: """alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet maxvit_t
    mnasnet0_5 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_400mf regnet_y_400mf
    resnet18 resnet50 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11
    vgg11_bn vit_b_32 wide_resnet50_2 deeplabv3_mobilenet_v3_large deeplabv3_resnet50 fcn_resnet50
    lraspp_mobilenet_v3_large""",
    299: "inception_v3",
}
FILMS: Final = {
    "mc3_18": 112,
    "r2plus1d_18": 112,
    "r3d_18": 112,
    "s3d": 224,
    "mvit_v1_b": 224,
    "swin3d_t": 224,
}
DETECTORS: Final = """fasterrcnn_mobilenet_v3_large_320_fpn fcos_resnet50_fpn
    keypointrcnn_resnet50_fpn maskrcnn_resnet50_fpn retinanet_resnet50_fpn
    ssdlite320_mobilenet_v3_large ssd300_vgg16 fasterrcnn_resnet50_fpn"""

SIZED: Final = frozenset(
    {
        "alexnet",
        "convnext_tiny",
        "densenet121",
        "efficientnet_b0",
        "efficientnet_v2_s",
        "googlenet",
        "mobilenet_v2",
        "resnet18",
        "squeezenet1_1",
    }
)
"""Models that are also tested with other image sizes. Exports of other models take a minute."""
OWN_SIDES: Final = {
    f"torchvision {name}"
    for names in (*PICTURES.values(), DETECTORS)
    for name in names.split()
    if name not in SIZED
} | {"transformers SwinForImageClassification", "transformers YolosForObjectDetection"}

SMALL: Final[Mapping[str, int]] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
}
GPT: Final[Mapping[str, int]] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300}
LLAMA: Final = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
T5: Final = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 300,
    "decoder_start_token_id": 0,
}
BART: Final = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "vocab_size": 300,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
PIXELS: Final = {"image_size": 64, "patch_size": 16}
NO_TOKENS: Final = {name: value for name, value in SMALL.items() if name != "vocab_size"}
SOUND: Final = {
    **SMALL,
    "conv_dim": [32] * 3,
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}

TRANSFORMERS: Final[Mapping[str, tuple[Mapping[str, Any], str]]] = {
    "BertForSequenceClassification": (SMALL, "ids"),
    "BertForMaskedLM": (SMALL, "ids"),
    "BertForTokenClassification": (SMALL, "ids"),
    "DistilBertForSequenceClassification": (
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 300},
        "ids",
    ),
    "RobertaForQuestionAnswering": ({**SMALL, "pad_token_id": 0}, "ids"),
    "AlbertModel": ({**SMALL, "embedding_size": 32}, "ids"),
    "ElectraForPreTraining": ({**SMALL, "embedding_size": 32}, "ids"),
    "DebertaV2ForSequenceClassification": (SMALL, "ids"),
    "MPNetModel": (SMALL, "ids"),
    "ModernBertForSequenceClassification": ({**SMALL, "pad_token_id": 0}, "ids"),
    "GPT2LMHeadModel": (GPT, "ids"),
    "GPTNeoXForCausalLM": (SMALL, "ids"),
    "OPTForCausalLM": (
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "vocab_size": 300,
            "word_embed_proj_dim": 64,
        },
        "ids",
    ),
    "BloomForCausalLM": ({**GPT, "hidden_size": 64}, "ids"),
    "LlamaForCausalLM": (LLAMA, "ids"),
    "MistralForCausalLM": (LLAMA, "ids"),
    "Qwen2ForCausalLM": (LLAMA, "ids"),
    "Qwen3ForCausalLM": (LLAMA, "ids"),
    "GemmaForCausalLM": (LLAMA, "ids"),
    "PhiForCausalLM": (LLAMA, "ids"),
    "MixtralForCausalLM": ({**LLAMA, "num_local_experts": 4}, "ids"),
    "MambaForCausalLM": ({"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}, "ids"),
    "T5ForConditionalGeneration": (T5, "both"),
    "T5EncoderModel": (T5, "ids"),
    "BartForConditionalGeneration": (BART, "both"),
    "MarianMTModel": ({**BART, "pad_token_id": 0, "decoder_start_token_id": 0}, "both"),
    "ViTForImageClassification": ({**NO_TOKENS, **PIXELS}, "pixels"),
    "DeiTForImageClassification": ({**NO_TOKENS, **PIXELS}, "pixels"),
    "BeitForImageClassification": ({**NO_TOKENS, **PIXELS}, "pixels"),
    "Dinov2Model": ({**NO_TOKENS, **PIXELS}, "pixels"),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]},
        "pixels",
    ),
    "SegformerForSemanticSegmentation": (
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1] * 4, "decoder_hidden_size": 32},
        "pixels",
    ),
    "ResNetForImageClassification": (
        {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16},
        "pixels",
    ),
    "SiglipVisionModel": ({**NO_TOKENS, **PIXELS}, "pixels"),
    "CLIPVisionModel": ({**NO_TOKENS, **PIXELS}, "pixels"),
    "CLIPTextModel": ({**SMALL, "eos_token_id": 2}, "ids"),
    "Qwen2MoeForCausalLM": (
        {
            **LLAMA,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        "ids",
    ),
    "OlmoeForCausalLM": ({**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}, "ids"),
    "FalconForCausalLM": (SMALL, "ids"),
    "GPTJForCausalLM": ({**GPT, "rotary_dim": 8}, "ids"),
    "GPTNeoForCausalLM": (
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 300,
            "attention_types": [[["global", "local"], 1]],
        },
        "ids",
    ),
    "Gemma2ForCausalLM": (LLAMA, "ids"),
    "Phi3ForCausalLM": ({**LLAMA, "pad_token_id": 0}, "ids"),
    "StableLmForCausalLM": (LLAMA, "ids"),
    "Starcoder2ForCausalLM": (LLAMA, "ids"),
    "XLMRobertaForSequenceClassification": ({**SMALL, "pad_token_id": 0}, "ids"),
    "SqueezeBertModel": ({**SMALL, "embedding_size": 64}, "ids"),
    "ConvBertModel": ({**SMALL, "embedding_size": 64}, "ids"),
    "XLNetModel": (
        {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "vocab_size": 300},
        "ids",
    ),
    "PegasusForConditionalGeneration": (BART, "both"),
    "MBartForConditionalGeneration": (BART, "both"),
    "SwinForImageClassification": (
        {
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        "pixels",
    ),
    "YolosForObjectDetection": (
        {**NO_TOKENS, **PIXELS, "image_size": [64, 64], "num_detection_tokens": 5},
        "pixels",
    ),
    "VideoMAEForVideoClassification": ({**NO_TOKENS, **PIXELS, "num_frames": 4}, "frames"),
    "ASTForAudioClassification": ({**NO_TOKENS, "max_length": 64, "num_mel_bins": 32}, "mels"),
    "Wav2Vec2ForCTC": (SOUND, "sound"),
    "HubertForCTC": (SOUND, "sound"),
    "WhisperForConditionalGeneration": (
        {
            **BART,
            "num_mel_bins": 20,
            "max_source_positions": 50,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
        "mel",
    ),
}


class Answers(nn.Module):
    """Transformers model with positional arguments; it returns a tuple of tensors, but no cache."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self._names = model, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        named = dict(zip(self._names, inputs, strict=True))
        if hasattr(self.model.config, "use_cache"):
            named["use_cache"] = False
        output = self.model(**named, return_dict=True)
        return tuple(value for value in output.values() if isinstance(value, torch.Tensor))


class Dense(nn.Module):
    """Module that returns a tuple of the values in a segmenter's or GoogLeNet's output dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        output = self.model(x)
        return tuple(output.values()) if isinstance(output, dict) else output


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(16, 24, batch_first=True, **options)
        self.head = nn.Linear(48 if options.get("bidirectional") else 24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.layer(x)[0][:, -1])
        return output


class Nested(nn.Module):
    """Module whose inputs and outputs are dicts, lists, tuples and None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, state: dict[str, Any], mask: torch.Tensor | None = None) -> dict[str, Any]:
        h = self.layer(state["x"]) + state["cache"][0][0]
        return {"out": h if mask is None else h * mask, "cache": [(h * 2, None)], "mask": mask}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        output: torch.Tensor = self.last(torch.cat([x, self.up(torch.relu(self.down(x)))], 1))
        return output


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(50, 16), nn.Embedding(80, 16)
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, person: torch.Tensor, thing: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(torch.cat([self.people(person), self.things(thing)], -1))
        return output


def _ids(length: int = 12) -> torch.Tensor:
    return torch.randint(3, 290, (1, length))


EXAMPLES: Final[Mapping[str, Callable[[], dict[str, torch.Tensor]]]] = {
    "ids": lambda: {"input_ids": _ids()},
    "both": lambda: {"input_ids": _ids(), "decoder_input_ids": _ids(5)},
    "pixels": lambda: {"pixel_values": torch.randn(1, 3, 64, 64)},
    "frames": lambda: {"pixel_values": torch.randn(1, 4, 3, 64, 64)},
    "mels": lambda: {"input_values": torch.randn(1, 64, 32)},
    "sound": lambda: {"input_values": torch.randn(1, 1600)},
    "mel": lambda: {"input_features": torch.randn(1, 20, 100), "decoder_input_ids": _ids(5)},
}


def _transformer(name: str) -> Made:
    import transformers

    options, kind = TRANSFORMERS[name]
    cls: Any = getattr(transformers, name)
    examples = EXAMPLES[kind]()
    return Answers(cls(cls.config_class(**options)), tuple(examples)), tuple(examples.values())


def _as_it_comes(name: str, options: Mapping[str, Any], *kinds: str) -> Made:
    """Return a transformers model unchanged, with a tokenizer's argument names in the example."""
    import transformers

    cls: Any = getattr(transformers, name)
    examples = {key: value for kind in kinds for key, value in EXAMPLES[kind]().items()}
    if "ids" in kinds:
        examples["attention_mask"] = torch.ones_like(examples["input_ids"])
    return cls(cls.config_class(**options)), examples


def _vision(name: str, *shape: int) -> Made:
    import torchvision

    keywords = {"weights": None, "weights_backbone": None}
    has_backbone = any(part in name for part in ("deeplab", "fcn", "ras", *DETECTORS.split()))
    if not has_backbone:
        del keywords["weights_backbone"]
    model = torchvision.models.get_model(name, **keywords)
    return Dense(model), (torch.randn(1, *shape),)


def _small() -> dict[str, Entry]:
    x = torch.randn
    return {
        "mlp": lambda: (
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)),
            (x(1, 64),),
        ),
        "lstm": lambda: (Recurrent(nn.LSTM, num_layers=2), (x(1, 9, 16),)),
        "lstm-bidirectional": lambda: (Recurrent(nn.LSTM, bidirectional=True), (x(1, 9, 16),)),
        "gru": lambda: (Recurrent(nn.GRU), (x(1, 9, 16),)),
        "rnn": lambda: (Recurrent(nn.RNN), (x(1, 9, 16),)),
        "nested": lambda: (Nested(), ({"x": x(1, 8), "cache": [(x(1, 8), None)]}, x(1, 8))),
        "none": lambda: (Nested(), ({"x": x(1, 8), "cache": [(x(1, 8), None)]}, None)),
        "unet": lambda: (UNet(), (x(1, 3, 32, 32),)),
        "recommender": lambda: (Recommender(), (torch.tensor([3]), torch.tensor([7]))),
        "tcn": lambda: (
            nn.Sequential(
                nn.Conv1d(4, 8, 3, padding=2, dilation=2),
                nn.ReLU(),
                nn.BatchNorm1d(8),
                nn.AdaptiveAvgPool1d(1),
                nn.Flatten(),
            ),
            (x(1, 4, 40),),
        ),
        "autoencoder": lambda: (
            nn.Sequential(
                nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid()
            ),
            (x(1, 1, 28, 28),),
        ),
        "transformer-encoder": lambda: (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
                2,
                enable_nested_tensor=False,
            ),
            (x(1, 7, 32),),
        ),
        "pixel-shuffle": lambda: (
            nn.Sequential(nn.Conv2d(3, 12, 3, 1, 1), nn.PixelShuffle(2), nn.PReLU(3)),
            (x(1, 3, 16, 16),),
        ),
        "group-norm": lambda: (
            nn.Sequential(
                nn.Conv2d(3, 8, 3),
                nn.GroupNorm(2, 8),
                nn.Mish(),
                nn.Upsample(scale_factor=2, mode="bilinear"),
            ),
            (x(1, 3, 16, 16),),
        ),
    }


def catalogue() -> dict[str, Entry]:
    """Return all entries by name: torchvision's, transformers', and small modules."""
    entries: dict[str, Entry] = {}

    def vision(name: str, *shape: int) -> None:
        entries[f"torchvision {name}"] = lambda: _vision(name, *shape)

    for side, names in PICTURES.items():
        for name in names.split():
            vision(name, 3, side, side)
    for name, side in FILMS.items():
        vision(name, 3, 16, side, side)
    for name in DETECTORS.split():
        vision(name, 3, 320, 320)
    for name in TRANSFORMERS:
        entries[f"transformers {name}"] = lambda name=name: _transformer(name)  # type: ignore[misc]
    clip = {
        "text_config": TRANSFORMERS["CLIPTextModel"][0],
        "vision_config": TRANSFORMERS["CLIPVisionModel"][0],
    }
    for name, options, *kinds in (
        ("BertForSequenceClassification", SMALL, "ids"),
        ("GPT2LMHeadModel", GPT, "ids"),
        ("T5ForConditionalGeneration", T5, "both"),
        ("CLIPModel", clip, "ids", "pixels"),
    ):
        entries[f"transformers {name} as it comes"] = functools.partial(
            _as_it_comes, name, options, *kinds
        )
    entries |= {f"small {name}": entry for name, entry in _small().items()}
    return entries | {f"odd {name}": entry for name, entry in ODD.items()}
