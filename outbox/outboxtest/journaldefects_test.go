package outboxtest_test

import (
	"database/sql"
	"testing"

	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// journalDefects are deliberate mistakes of the journal in memory, and the
// subtests that must notice each.
var journalDefects = map[string][]string{
	// Putting.
	"check fails":                                 {"CheckOfTheJournalFindsNothingWrong"},
	"put overwrites the payload":                  {"PutOfAnExistingKeyChangesNothing"},
	"put makes a message due again":               {"PutOfAnExistingKeyChangesNothing"},
	"existing message comes without its payload":  {"PutOfAnExistingKeyChangesNothing", "PayloadsOfMessagesComeBackAsPut"},
	"existing message is created":                 {"PutOfAnExistingKeyChangesNothing", "SameKeyTwiceInOneTransactionExists", "PutWithoutATransactionIsDurable"},
	"existing key delays its group":               {"PutOfAnExistingKeyLeavesItsGroupAlone"},
	"nothing differs":                             {"PutOfAnExistingKeyChangesNothing", "AnswersComeInTheOrderOfRows"},
	"another group does not differ":               {"PutOfAnExistingKeyChangesNothing"},
	"put outside the transaction":                 {"RolledBackPutLeavesNothing", "RolledBackSavepointTakesItsPutsBack", "OnlyThePutterSeesItsMessageBeforeCommit", "RolledBackVerbsLeaveNothing", "BegunPutRollsBackWithItsLease"},
	"cancelled context is ignored by the journal": {"CancelledPutLeavesTheTransactionUsable", "CancelledCallsOfTheJournalChangeNothing"},
	"answers are sorted":                          {"AnswersComeInTheOrderOfRows", "GroupIsNumberedInTheOrderOfRows", "AnyNumberOfMessagesIsPutAtOnce"},
	"numbered by key":                             {"GroupIsNumberedInTheOrderOfRows"},
	"numbers are counted by channel":              {"NumbersAreUniqueAndSurviveJavaScript"},
	"numbers are the clock":                       {"ClockSetBackKeepsNumbersIncreasing", "GroupIsNumberedInTheOrderOfRows"},
	"channels share keys":                         {"MessagesOfChannelsAreIndependent"},
	"channels share groups":                       {"MessagesOfChannelsAreIndependent"},
	"delay of a put is ignored":                   {"DelayedMessageWaits", "EmptyJournalGivesNothing", "RunIsCutWhereOneIsNotDue"},
	"one delay for all":                           {"DelaysOfManyAreEachItsOwn"},
	"put looks before it waits":                   {"KeyThatGoesWhileAPutWaitsIsNew"},
	"put does not lock its group":                 {"SecondPutOfAGroupWaitsForTheFirst", "GroupHeldByAPutIsBusy", "GroupHeldByAPutIsNotClaimed"},
	"putters of a key do not wait":                {"SecondPutOfAKeyWaitsForTheFirst"},
	"keys are folded":                             {"KeysOfMessagesAreComparedByteByByte"},
	"long keys are cut":                           {"LongestKeysAndGroupsFit"},
	"payload is text":                             {"PayloadsOfMessagesComeBackAsPut"},
	"empty payload is nil":                        {"PayloadsOfMessagesComeBackAsPut"},
	"empty header is not nil":                     {"HeadersOfMessagesComeBackAsPut"},
	"unreadable headers are hidden":               {"UnreadableHeadersAreToldAndHarmNobody"},

	// Beginning.
	"begin of a put is ignored":               {"BegunPutIsLeased", "BegunPutHoldsItsGroup"},
	"begun put does not count an attempt":     {"BegunPutIsLeased"},
	"begun put ignores its group":             {"BegunPutBehindAnotherIsBlocked"},
	"begun message does not hold its group":   {"BegunPutHoldsItsGroup", "BeginHoldsTheGroup"},
	"begun put of an existing key is blocked": {"BegunPutOfAnExistingKeyBeginsNothing"},
	"message begun early stays away":          {"LapsedBegunMessageComesBackAmbiguous"},
	"begin ignores the group":                 {"BeginOfAFollowerIsBlocked", "RefusedVerbsLeaveTheTransactionUsable"},
	"begin waits until due":                   {"BeginLeasesAMessageDueOrNot"},
	"lapsed message is begun":                 {"LapsedBegunMessageComesBackAmbiguous", "EveryVerbInEveryState"},
	"begin overrides a held group":            {"GroupHeldByAPutIsNotClaimed"},

	// Claiming.
	"claim leaves out the payload":               {"ClaimReturnsTheWholeMessage"},
	"claim is not sending":                       {"ClaimReturnsTheWholeMessage", "EveryVerbInEveryState"},
	"due time of messages is ignored":            {"EmptyJournalGivesNothing", "DelayedMessageWaits", "SettlementMakesOfAMessageWhatItSays"},
	"messages are claimed by number":             {"MessagesComeInTheOrderOfDueTimes"},
	"messages are claimed by key":                {"MessagesComeInTheOrderOfDueTimes"},
	"limit of messages is ignored":               {"ClaimOfMessagesTakesNoMoreThanItsLimit", "RunIsCutByTheLimit"},
	"leases of messages are ignored":             {"LeasedMessageIsNotClaimedAgain", "ClaimsAtOnceShareNoMessage", "RacingGroupsKeepTheirOrder"},
	"leases of messages never lapse":             {"LapsedMessageComesBackAmbiguous", "LeaseOfAMessageHoldsUntilItsEnd"},
	"lapsed messages are left":                   {"LapsedMessageComesBackAmbiguous"},
	"lapsed message is not ambiguous":            {"LapsedMessageComesBackAmbiguous", "LapsedBegunMessageComesBackAmbiguous", "LostRunIsNotOvertaken"},
	"dead messages are claimed":                  {"EndedMessagesAreNotClaimed", "EveryVerbInEveryState"},
	"fresh messages wait for a full pass":        {"FreshMessageIsClaimedWithoutAFullPass"},
	"full pass leaves out late messages":         {"LateCommitOfAMessageIsFoundByAFullPass"},
	"attempts of messages are not counted":       {"ClaimReturnsTheWholeMessage", "FailedMessageComesBackAfterItsDelay"},
	"tokens of messages stay":                    {"TokensOfAMessageIncrease", "StaleTokenOfAMessageChangesNothing"},
	"tokens of messages restart after a discard": {"TokensOfAMessageIncrease", "DiscardTakesTheMessageFromItsHolder"},
	"lapse in company counts":                    {"LapsesInCompanyCostNoAttempt", "BystandersOfAPoisonMessageSurvive"},
	"lapse never counts":                         {"LapsesInCompanyCostNoAttempt", "BystandersOfAPoisonMessageSurvive"},
	"poison is claimed in company":               {"TwiceLapsedIsClaimedAlone", "TwiceLapsedOfAGroupIsClaimedAlone", "BystandersOfAPoisonMessageSurvive"},
	"lapses are never forgotten":                 {"SettlementForgetsLapses"},
	"doubt is forgotten":                         {"DoubtOutlivesSettlements"},
	"doubt is not raised":                        {"DoubtOutlivesSettlements"},
	"doubt is never cleared":                     {"DoubtOutlivesSettlements"},
	"claim overrides held messages":              {"HeldMessageIsSkipped"},
	"claim overrides a held group":               {"GroupHeldByAPutIsNotClaimed"},

	// Groups.
	"groups have no order":                  {"OneRunOfAGroupIsOutAtMost", "RetryOfAHeadIsNeverOvertaken", "EndedHeadBlocksItsGroup"},
	"many runs of a group":                  {"OneRunOfAGroupIsOutAtMost", "GroupIsLetGoAfterTheLastOfItsRun"},
	"runs are reversed":                     {"GroupIsClaimedAsARunInItsOrder", "ThousandsOfGroupsDrainInOrder", "LongGroupDrainsInOrder", "ReleasedRunComesBackWhole", "OneHotGroupKeepsItsOrder"},
	"runs are mixed":                        {"RunsOfGroupsAreNotMixed"},
	"runs of one":                           {"GroupIsClaimedAsARunInItsOrder"},
	"group is let go before its last":       {"GroupIsLetGoAfterTheLastOfItsRun"},
	"group is never let go":                 {"GroupOutlivesItsMessages", "GroupIsLetGoAfterTheLastOfItsRun", "PutRacingASettlementIsNotStranded"},
	"held group is not busy":                {"GroupHeldByAPutIsBusy"},
	"blocked head is skipped":               {"EndedHeadBlocksItsGroup", "EndedMessageInTheMiddleCutsTheRun", "BlockedGroupsDoNotHideOthers"},
	"skip is ignored":                       {"EndedHeadIsSkippedWhereAsked", "GroupsBlockedBeforeAreSkippedToo"},
	"sent messages block":                   {"SentMessagesDoNotBlock", "BlockedGroupGoesOnWhenItsHeadIsAmended"},
	"group is not cut where one is not due": {"RunIsCutWhereOneIsNotDue", "RetryOfAHeadIsNeverOvertaken", "HeldMessageCutsTheRun"},
	"purged head blocks":                    {"BlockedGroupGoesOnWhenItsHeadIsPurged"},
	"blocked group blocks all":              {"BlockedGroupDoesNotBlockOthers"},
	"discarded message keeps its group":     {"DiscardOfALeasedMessageFreesItsGroup"},
	"groups come last":                      {"GroupsAndSinglesShareClaims"},
	"groups are folded":                     {"GroupsAreComparedByteByByte"},

	// Settling and extending.
	"done messages are kept":                {"SettlementMakesOfAMessageWhatItSays", "EveryVerbInEveryState"},
	"sent messages are not kept":            {"SettlementMakesOfAMessageWhatItSays", "SameSettlementOfAMessageAgainIsDone"},
	"ref is dropped":                        {"SettlementMakesOfAMessageWhatItSays"},
	"code is dropped":                       {"SettlementMakesOfAMessageWhatItSays", "ListNarrowsByEachFilter"},
	"completion has no time":                {"SettlementMakesOfAMessageWhatItSays"},
	"unknown is dead":                       {"SettlementMakesOfAMessageWhatItSays", "ResolvedMessageIsWhatWasFoundOut"},
	"error of a message is dropped":         {"LongestDelaysAndErrorsAreKept", "FailedMessageComesBackAfterItsDelay"},
	"delay of a retry is ignored":           {"SettlementMakesOfAMessageWhatItSays", "FailedMessageIsDueExactlyAfterItsDelay"},
	"release counts":                        {"ReleaseOfAMessageGivesTheAttemptBack", "SettlementMakesOfAMessageWhatItSays"},
	"released message is failed":            {"ReleaseOfAMessageGivesTheAttemptBack", "EveryVerbInEveryState", "EveryVerbInEveryStateOfAGroup"},
	"results of messages are sorted":        {"EachSettlementOfAMessageHasItsResult"},
	"results of extensions are sorted":      {"EachExtensionOfAMessageHasItsResult"},
	"same settlement of a message is stale": {"SameSettlementOfAMessageAgainIsDone", "EveryVerbInEveryState"},
	"other settlement of a message is done": {"OtherSettlementOfAMessageAfterwardsIsStale"},
	"message is settled twice":              {"SameSettlementOfAMessageAgainIsDone", "OtherSettlementOfAMessageAfterwardsIsStale"},
	"again is ignored for messages":         {"GoneMessageIsStaleUnlessSettledAgain"},
	"gone message is done":                  {"GoneMessageIsStaleUnlessSettledAgain"},
	"lapsed message is stale":               {"LapsedLeaseOfAMessageNobodyTookIsSettled"},
	"token of a message is not compared":    {"StaleTokenOfAMessageChangesNothing", "EachSettlementOfAMessageHasItsResult"},
	"group of a settlement is needed":       {"KeyAndTokenAreEnough"},
	"settling needs no transaction":         {"TransactionIsNeededWhereOneIsNamed"},
	"settle overrides held messages":        {"HeldMessageIsBusy"},
	"settle of a message does not wait":     {"SettlementOfAMessageWaitsForTheWriter"},
	"extend of a message does nothing":      {"ExtendHoldsAMessage", "LapsedLeaseOfAMessageNobodyTookIsExtended"},
	"extend of a message ignores the token": {"EachExtensionOfAMessageHasItsResult", "StaleTokenOfAMessageChangesNothing"},
	"extend forgets the group":              {"ExtendHoldsTheGroup", "BeginHoldsTheGroup", "ExtendBesideAPutKeepsTheGroup"},
	"lost run is extended":                  {"RunThatAnotherHasTakenIsNotExtended"},
	"settled message is extended":           {"OtherSettlementOfAMessageAfterwardsIsStale", "EveryVerbInEveryState"},
	"lapsed message is not extended":        {"LapsedLeaseOfAMessageNobodyTookIsExtended"},

	// Callers' transactions.
	"caller's transaction is left out":        {"RolledBackVerbsLeaveNothing", "VerbsSeeTheirTransaction"},
	"finished transaction is another error":   {"VerbsOfAFinishedTransactionAreRefused"},
	"transactions are rolled back":            {"CommittedVerbsTakeEffect", "PutCreatesAPendingMessage"},
	"refusal spoils the transaction":          {"RefusedVerbsLeaveTheTransactionUsable", "BegunPutBehindAnotherIsBlocked"},
	"existing key is a serialization failure": {"VisibleKeyExistsAtEachIsolationLevel"},

	// Reading, amending, purging.
	"list is outside the transaction":  {"OnlyThePutterSeesItsMessageBeforeCommit", "VerbsSeeTheirTransaction"},
	"listed by key":                    {"ListPagesThroughNumbers"},
	"page repeats its first message":   {"ListPagesThroughNumbers"},
	"list of messages has payloads":    {"ListHasPayloadsOnlyIfAsked"},
	"key filter is a prefix":           {"ListNarrowsByEachFilter"},
	"group filter is ignored":          {"ListNarrowsByEachFilter", "AmendmentNarrowsByEachFilter"},
	"code filter is ignored":           {"ListNarrowsByEachFilter", "AmendmentNarrowsByEachFilter"},
	"state filter is ignored":          {"ListNarrowsByEachFilter", "AmendmentNarrowsByEachFilter"},
	"amend ignores the state":          {"EveryVerbInEveryState", "AmendmentGoesInPages"},
	"amend overrides held messages":    {"HeldMessageIsSkipped"},
	"limit of an amendment is ignored": {"AmendmentGoesInPages"},
	"dry run is real":                  {"DryRunOfAnAmendmentCounts", "PurgeDeletesWhatEndedLongAgo"},
	"retry by hand keeps the attempts": {"RetryByHandStartsAnew"},
	"retry by hand is not due":         {"RetryByHandStartsAnew", "BlockedGroupGoesOnWhenItsHeadIsAmended"},
	"retry by hand clears the error":   {"RetryByHandStartsAnew"},
	"purge ignores the state":          {"PurgeDeletesWhatEndedLongAgo"},
	"purge ignores the age":            {"PurgeDeletesWhatEndedLongAgo", "MessagesArePurgedByTheClock"},
	"purge begins with the newest":     {"PurgeTakesTheOldestFirst"},
	"limit of a purge is ignored":      {"PurgeTakesTheOldestFirst"},
	"purge overrides held messages":    {"HeldMessageIsSkipped"},

	// Watching.
	"look overlooks leased messages":   {"LookTellsWhenToClaimMessages"},
	"look overlooks groups":            {"LookTellsWhenToClaimAGroup"},
	"blocked groups are due":           {"LookTellsWhenToClaimAGroup", "EndedHeadBlocksItsGroup"},
	"look waits for locks":             {"ReadersOfMessagesWaitForNobody"},
	"systems share messages":           {"LookAnswersForBothSystems"},
	"blocked groups are not counted":   {"StatsShowEveryChannelOfTheJournal", "BlockedGroupsDoNotHideOthers"},
	"dead messages are not counted":    {"StatsCountMessagesByState", "StatsShowEveryChannelOfTheJournal"},
	"blocked messages are due":         {"StatsShowEveryChannelOfTheJournal"},
	"no hints":                         {"HintsFollowPuts"},
	"hint of another version":          {"HintsFollowPuts"},
	"systems share an outage":          {"OutagePausesTheJournalAlone"},
	"outage is ignored by the journal": {"OutagePausesTheJournalAlone", "OutageIsProbedWithOneMessage"},
	"probe takes a batch of messages":  {"OutageIsProbedWithOneMessage", "LostProbeOfAMessageIsGivenOutAgain"},
	"delays of messages are doubled":   {"TimesOfMessagesAreTheClocks"},
	"begin of no message is a state":   {"BeginOfNoMessageIsNotFound"},
}

func TestJournalSuiteNoticesDefects(t *testing.T) {
	notice(t, journalDefects, "TestMemoryJournalHoldsTheContractOnAClock", "TestMemoryJournalWithOneWriterHoldsTheContract", journalNames(false))
}

func TestEverySubtestOfTheJournalHasADefect(t *testing.T) {
	everyHasADefect(t, journalDefects, append(journalNames(false), journalNames(true)...))
}

// journalNames returns the subtests that a store with every ability runs.
func journalNames(oneWriter bool) []string {
	corrupt := func(*testing.T, *sql.DB, string, string) {}
	return outboxtest.JournalSuite{Clock: &outboxtest.Clock{}, OneWriter: oneWriter, Corrupt: corrupt}.Names()
}
