"""From a conversation's body to a plan and a prompt, with its tools and the model's reasoning; for every chat route."""

from slipstream.serve.engine.engine import RequestLimits
from slipstream.serve.openai.bodies import ChatBody
from slipstream.serve.text.dialect import Dialect
from slipstream.serve.text.params import GenerationParams, make_plan
from slipstream.serve.text.prompts import Prompt, chat_prompt
from slipstream.serve.text.structured import Structure, of_parts, structure_of
from slipstream.serve.text.tools import choose
from slipstream.tokenize.tokenizer import Tokenizer


def plan_chat(
    body: ChatBody, dialect: Dialect, tokenizer: Tokenizer, limits: RequestLimits
) -> tuple[GenerationParams, list[Prompt]]:
    """Blocking: a template may take seconds. Raises BadRequest naming the field."""
    choice = choose(body, dialect)
    bound = None
    if choice.calls:
        own = structure_of(body)
        bound = Structure(choice.calls, choice.param)
        if choice.either and own is not None:  # the error names the field whose schema is the likelier cause
            strict = any(tool.function.strict for tool in body.tools or ())
            either = of_parts(choice.either, own.param, call=choice.calls, answer=own.text)
            bound = Structure(either, "tools" if strict else own.param)
    plan = make_plan(body, tokenizer, choice.reading, bound)
    return plan, [chat_prompt(body, plan, tokenizer, limits, choice.tools, dialect)]
