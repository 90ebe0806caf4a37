"""What `/v1/responses` adds to a chat: conversion, events, stored responses and background runs."""
