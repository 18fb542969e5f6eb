"""The server sides of the wire formats that the fake model server speaks."""
