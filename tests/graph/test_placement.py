import copy
import xml.etree.ElementTree

import pytest
import yaml

from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.graph import draw
from slipstream.graph.known import KNOWN, is_composite
from slipstream.graph.launch import worker_groups
from slipstream.graph.placement import load, weights_of
from slipstream.weights.packages import PACKAGES


def test_what_a_composite_model_loads_is_known_by_name_for_pull_and_doctor():
    assert weights_of("voice") == ["whisper-tiny.en", "smollm2-135m"]
    assert set(weights_of("voice")) <= set(PACKAGES)


def test_the_known_model_is_placed_and_every_name_is_told_apart():
    placement, model = load("voice")
    assert [placement.group_of(c.name) for c in model.components] == ["hear", "write", "front", "think", "front", "speak"]
    assert is_composite("voice") and is_composite("x/mine.yaml") and not is_composite("smollm2-135m")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p["groups"].pop("speak"), "component speech is placed on no group"),
        (lambda p: p["groups"]["hear"].update(components=["encoder", "ears"]), "group hear: model voice has no component ears"),
        (lambda p: p["groups"]["speak"].update(components=["speech", "encoder"]), "held by group hear too"),
        (lambda p: p["groups"]["speak"].update(components=["speech", "prompt"]), "component prompt is a function"),
        (lambda p: p["groups"]["hear"].update(tensor_parallel_size=2), "group hear: tensor_parallel_size"),
        (lambda p: p["groups"]["hear"].update(device="cuda"), "group hear: device 'cuda'"),
        (lambda p: p["groups"]["hear"].update(thread=1), "unknown field `thread`"),
        (lambda p: p["groups"]["hear"].update(components=[]), "group hear: it holds no component"),
        (lambda p: p["settings"].update(ears={}), "settings: model voice has no component ears"),
        (lambda p: p["settings"]["llm"].update(weights=["a"]), "settings: llm: weights"),
        (lambda p: p.update(model="slipstream.components.voice:NOTHING"), "cannot be imported"),
        (lambda p: p.update(model="os:path"), "is not a model"),
    ],
)
def test_a_placement_that_cannot_serve_is_refused_by_name(tmp_path, change, says):
    p = copy.deepcopy(KNOWN["voice"])
    change(p)
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(p))
    with pytest.raises(ConfigError) as e:
        load(str(file))
    assert says in str(e.value)


def test_a_step_longer_than_the_wished_itl_is_refused_beside_a_decoder(tmp_path):
    p = copy.deepcopy(KNOWN["voice"])
    p["groups"]["write"] = {"components": ["decoder", "encoder"]}
    del p["groups"]["hear"]
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(p))
    with pytest.raises(
        ConfigError, match="group write: a step of component encoder takes 500 ms.*component decoder in the same group"
    ):
        load(str(file))
    file.write_text(yaml.safe_dump({**p, "target_itl_ms": 600}))
    placement, model = load(str(file))
    from slipstream.config import EngineConfig

    specs, _, _ = worker_groups(placement, model, {}, EngineConfig())
    assert len(specs) == 2


def test_plan_prints_what_crosses_and_draws_it(tmp_path, capsys):
    svg, png = tmp_path / "voice.svg", tmp_path / "voice.png"
    assert main(["plan", "voice", "--draw", str(svg), "--draw", str(png)]) == 0
    out = capsys.readouterr().out
    assert "converse: encoder.features -> decoder.features (hear -> write, Fixed(n=1" in out and "arena: 4 segments" in out
    texts = {e.text for e in xml.etree.ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {"encoder", "decoder", "llm", "speech", "group think", "out.audio", "in.messages"} <= texts
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert main(["plan", "smollm2-135m"]) == 2 and main(["plan", "voice", "--draw", "x.gif"]) == 2
    assert main(["plan", str(tmp_path / "no.yaml")]) == 2


def test_no_two_boxes_of_a_drawing_overlap():
    placement, model = load("voice")
    boxes = draw.lay_out(model, placement).boxes
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y
