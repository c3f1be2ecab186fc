"""Conversations with the model: environments of several turns, tools, and rewards of a whole group.

What an environment needs imports no torch.
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
