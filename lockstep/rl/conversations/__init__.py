"""Conversations with the model: multi-turn environments, tools, and rewards for a whole group.

The parts that an environment needs do not import torch.
"""

from lockstep.rl.conversations.protocol import (
    Chat,
    ConversationEnvironment,
    ConversationOver,
    Episode,
    Message,
    Reply,
    ToolCall,
)

__all__ = ["Chat", "ConversationEnvironment", "ConversationOver", "Episode", "Message", "Reply", "ToolCall"]
