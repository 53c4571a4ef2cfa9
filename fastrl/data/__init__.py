"""From what people bring, texts and chats, to what models read."""
