"""Carriers of bytes. A transport posts a body and hands back the answer, for any dialect."""
