"""The decode role: one process goes on from prompts that others computed.

    accept     is the session of this model, of this prompt, and still there?
    submit     position the plan, and into the engine's queue       (nothing is fetched, decoded, preprocessed, tokenised)
    admitted   the engine has room, and fetches the KV              -> the caller has an Answer
    take       the first token, which came with the session, then the engine's own
    Answer     detokenise, match stop strings, join                 -> the caller

Without a session a request is run whole, as far as that needs no picture: there is no tower here.

Whether an output ends with its first token is decided here, with the whole request, and not where it was sampled. The
prompt's log probabilities were sent by the prefill engine; here they are not asked for again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from triptych.core.errors import Internal, InvalidRequest, RoleMismatch, UnsupportedFeature
from triptych.core.events import Span
from triptych.core.request import Resume
from triptych.core.session import KvSession
from triptych.roles.fan_out import fan_out
from triptych.roles.session_checks import check_blocks, check_first, check_lease, check_origin

if TYPE_CHECKING:
    from triptych.core.handles import KvLayout
    from triptych.core.request import GenerateRequest, Request
    from triptych.engine.loop import Engine
    from triptych.media.admission import Ticket
    from triptych.roles.aggregated import Aggregated
    from triptych.roles.answer import AnswerStream
    from triptych.roles.intake import Draft, Intake
    from triptych.roles.live import LiveRequests
