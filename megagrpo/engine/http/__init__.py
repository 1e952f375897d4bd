"""Requests to servers, their state and their health."""
