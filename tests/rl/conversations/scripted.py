"""A model that says what it is told to, at the protocol's own seam: everything above it is real."""

import asyncio

from lockstep.data.replies import QWEN3, parse_calls
from lockstep.rl.conversations import Chat, ConversationOver, Episode, Reply


def scripted(*replies, format=QWEN3):
    """A chat whose model replies with these texts, or with what a function makes of the messages; then it is over."""
    left = list(replies)

    async def ask(messages):
        if not left:
            raise ConversationOver
        reply = left.pop(0)
        text = reply(messages) if callable(reply) else reply
        return text if isinstance(text, Reply) else Reply(text, tool_calls=parse_calls(text, format))

    return Chat(ask)


def converse(environment, example, *replies):
    """(rewards, chat) of a conversation, as the driver would come to them."""

    async def run():
        chat = scripted(*replies)
        over = False
        try:
            rewards = await environment.converse(example, chat)
        except ConversationOver:
            return environment.unfinished, chat
        if rewards is None:
            graded = await environment.grade(example, [Episode(chat.messages, rewards, over)])
            rewards = graded[0] if graded is not None else environment.reward(example, Episode(chat.messages).answer)
        return rewards, chat

    return asyncio.run(run())


def call(name, **arguments):
    """A call as Qwen3 writes it."""
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
