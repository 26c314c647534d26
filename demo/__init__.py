"""The embedded demo pair: its data, its tokenizer, its training and an independent offline evaluation."""
