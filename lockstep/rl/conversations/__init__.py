"""Conversations with the model: multi-turn environments, tools, and rewards for a whole group.

The parts that an environment needs do not import torch.
"""

from lockstep.rl.conversations.chat import Chat, ConversationOver, Reply
from lockstep.rl.conversations.protocol import ConversationEnvironment, Episode
from lockstep.rl.environments.protocol import Message
from lockstep.tool_call import ToolCall

__all__ = ["Chat", "ConversationEnvironment", "ConversationOver", "Episode", "Message", "Reply", "ToolCall"]
