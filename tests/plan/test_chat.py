"""A chat's tokens, and which of them are trained on: against masks written down by hand, turn by turn."""

from __future__ import annotations

import pytest
from own_models import CHATML, messages, tokenizer

from lorabench.plan.chat import ChatError, tokenize, tokenize_completion
from lorabench.plan.weights import WeightsError, gguf_file, load_tokenizer

TWO_TURNS = [("user", "3 * 4?"), ("assistant", "Twelve."), ("user", "Thanks!"), ("assistant", "Welcome.")]
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_PROMPT = (  # as Llama 2's and Mistral's: nothing is put before an answer, and roles have to alternate
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
)
THINKING = (  # as Qwen3's: what was thought is kept in the last answer, left out of those before
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>' + m.get('thought', '') + '</think>' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools[0]['name'] + '<|im_end|>' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m.get('tool_calls') %}{{ m['tool_calls'][0]['name'] + '()' }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What is read, and between > and < what is trained on. The end-of-turn token is, the role's header is not.
BY_HAND = {
    "chatml": (CHATML, TWO_TURNS, [
        "<|bos|><|im_start|>user\n3 * 4?<|im_end|>\n<|im_start|>assistant\n", ">Twelve.<|im_end|>\n",
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n", ">Welcome.<|im_end|>\n",
    ]),
    "marked": (MARKED, TWO_TURNS, [
        "<|im_start|>user\n3 * 4?<|im_end|>\n<|im_start|>assistant\n", ">Twelve.<|im_end|>",
        "\n<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n", ">Welcome.<|im_end|>", "\n",
    ]),
    "no_prompt": (NO_PROMPT, TWO_TURNS, [
        "<|bos|>[INST] 3 * 4? [/INST]", "> Twelve.<|im_end|>", "[INST] Thanks! [/INST]", "> Welcome.<|im_end|>",
    ]),
    "thinking": (THINKING, TWO_TURNS, [
        "<|im_start|>user\n3 * 4?<|im_end|>\n<|im_start|>assistant\n", ">Twelve.<|im_end|>\n",
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n", "><think></think>Welcome.<|im_end|>\n",
    ]),
    "the_assistant_begins": (CHATML, [("assistant", "Hello."), ("user", "Hi."), ("assistant", "Yes?")], [
        "<|bos|><|im_start|>assistant\n", ">Hello.<|im_end|>\n",
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n", ">Yes?<|im_end|>\n",
    ]),
    "system_and_two_answers": (CHATML, [("system", "S"), ("user", "U"), ("assistant", "A"), ("assistant", "B")], [
        "<|bos|><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        ">A<|im_end|>\n", "<|im_start|>assistant\n", ">B<|im_end|>\n",
    ]),
    "ends_with_the_user": (CHATML, [("user", "U"), ("assistant", "A"), ("user", "V")], [
        "<|bos|><|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n", ">A<|im_end|>\n",
        "<|im_start|>user\nV<|im_end|>\n",
    ]),
    "nobody_answers": (CHATML, [("user", "U")], ["<|bos|><|im_start|>user\nU<|im_end|>\n"]),
}  # fmt: skip


def expected(made, parts: list[str]) -> list[tuple[int, bool]]:
    """(token, trained) of each part, tokenized apart: the parts meet at special tokens, line ends and spaces."""
    return [
        (token, part.startswith(">"))
        for part in parts
        for token in made(part.removeprefix(">"), add_special_tokens=False)["input_ids"]
    ]


@pytest.mark.parametrize("name", BY_HAND)
def test_the_assistant_s_turns_are_trained_and_nothing_else(name):
    template, chat, parts = BY_HAND[name]
    made = tokenizer(template)
    assert list(zip(*tokenize(made, messages(chat)), strict=True)) == expected(made, parts)


def test_all_after_a_prompt_is_its_completion_as_in_trl():
    """Qwen3's kind of template begins an answer behind the prompt for it; what the prompt holds is context."""
    made, chat = tokenizer(THINKING), messages(TWO_TURNS)
    assert list(zip(*tokenize_completion(made, chat[:3], chat[3:]), strict=True)) == expected(made, [
        "<|im_start|>user\n3 * 4?<|im_end|>\n<|im_start|>assistant\nTwelve.<|im_end|>\n",
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n", "><think></think>Welcome.<|im_end|>\n",
    ])  # fmt: skip
    _, trained = tokenize_completion(tokenizer(MARKED), chat[:1], chat[1:])  # several turns: the user's are trained too
    assert trained == sorted(trained) and trained[-1]
    with pytest.raises(ChatError, match="roles must alternate"):
        tokenize_completion(tokenizer(NO_PROMPT), chat[:1], chat[2:])
    with pytest.raises(ChatError, match="has no chat template"):
        tokenize_completion(tokenizer(None), chat[:1], chat[1:])


def test_a_call_of_a_tool_is_an_answer_and_its_result_is_not():
    made = tokenizer(TOOLS)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "now"}]}
    chat = [*messages([("user", "When?")]), call, *messages([("tool", "Noon"), ("assistant", "At noon.")])]
    assert list(zip(*tokenize(made, chat, [{"name": "now"}]), strict=True)) == expected(made, [
        "<|im_start|>tools\nnow<|im_end|><|im_start|>user\nWhen?<|im_end|><|im_start|>assistant\n", ">now()<|im_end|>",
        "<|im_start|>tool\nNoon<|im_end|><|im_start|>assistant\n", ">At noon.<|im_end|>",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("template", "chat", "says"),
    [
        (None, TWO_TURNS, "has no chat template"),
        (NO_PROMPT, TWO_TURNS[1:], "roles must alternate"),
        ("{{ messages[0]['content'] | lower }}{{ messages | length }}", TWO_TURNS[1:], "words cannot be found"),
        ("{{ nothing.there }}", TWO_TURNS, "refuses it"),
    ],
)
def test_what_a_template_cannot_do_is_one_line(template, chat, says):
    with pytest.raises(ChatError, match=says) as raised:
        tokenize(tokenizer(template), messages(chat))
    assert "\n" not in str(raised.value)


@pytest.mark.exhaustive
def test_a_published_tokenizer_and_its_template():
    try:
        gguf_file("smollm2-135m-instruct")
    except WeightsError as error:
        pytest.skip(f"the tokenizer cannot be had here: {error}")
    made = load_tokenizer("smollm2-135m-instruct")
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert list(zip(*tokenize(made, messages(TWO_TURNS)), strict=True)) == expected(made, [
        system + "<|im_start|>user\n3 * 4?<|im_end|>\n<|im_start|>assistant\n", ">Twelve.<|im_end|>\n",
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n", ">Welcome.<|im_end|>\n",
    ])  # fmt: skip
