"""/v1/chat/completions, with OpenAI's Python package."""

import pytest
from test_chat import TALKS, folder, messages, run, talks
from test_serving import serving

import mdlm
import sample

openai = pytest.importorskip("openai")
folder, run, talks = folder, run, talks  # fixtures


@pytest.mark.slow
def test_openai_client_talks(run):
    """Whole, n of them, with logprobs, as a stream, in several turns; what it draws is sample's."""
    model, tokenizer, _ = mdlm.load(run)
    with serving(f"--out_dir={run}") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        create = client.chat.completions.create
        for talk in TALKS:
            answer = create(model="out", messages=talk[:-1], temperature=0, seed=1)
            [choice] = answer.choices
            assert choice.message.role == "assistant"
            assert (choice.message.content, choice.finish_reason) == (talk[-1]["content"], "stop")
            events = list(create(model="out", messages=talk[:-1], temperature=0, stream=True))
            deltas = [event.choices[0].delta for event in events]
            assert deltas[0].role == "assistant"
            assert "".join(delta.content for delta in deltas) == talk[-1]["content"]
            assert events[-1].choices[0].finish_reason == "stop"
        parts = [dict(type="text", text="c"), dict(type="text", text="at")]
        hot = dict(messages=[dict(role="user", content=parts)], n=3, seed=5, temperature=3.0)
        answer = create(model="out", logprobs=True, top_logprobs=2, **hot)
        wanted = sample.write(model, tokenizer, "cat", n=3, seed=5, temperature=3.0)
        for choice, text in zip(answer.choices, wanted, strict=True):
            assert choice.message.content == text.partition("\n")[2]
            content = choice.logprobs.content
            assert "".join(token.token for token in content) == choice.message.content
            assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in content)
        assert len(set(wanted)) > 1
        short = create(model="out", max_completion_tokens=1, temperature=0, messages=TALKS[2][:3])
        assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 1
        for refused in (
            dict(messages=[]),
            dict(messages=["cat"]),
            dict(messages=[dict(role="user")]),
            dict(messages=[dict(role="user", content=[dict(type="image_url", image_url="a")])]),
            dict(messages=messages("<|im_end|>")),
            dict(messages=messages("cat"), tools=[dict(type="function")]),
        ):
            with pytest.raises(openai.BadRequestError) as e:
                create(model="out", **refused)
            assert "\n" not in e.value.body["message"]
        for many in (messages("cat") * 20_000, [dict(role="a" * 900_000, content="cat")]):
            with pytest.raises(openai.BadRequestError, match="longer than this server") as e:
                create(model="out", messages=many)  # by its beginning, as other texts
            assert e.value.body["code"] == "context_length_exceeded"
