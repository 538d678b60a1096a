"""The same requests by transformers' own ways, by other libraries and by engines: `specdec bench peers`."""
