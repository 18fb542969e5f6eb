"""Dialogues with guests of a restaurant."""

from environments.dialogue_booking.environment import DialogueBooking, DialogueBookingConfig

__all__ = ["DialogueBooking", "DialogueBookingConfig"]
